"""How nodes of a tree combine uploads: against formulas in NumPy, against bounds, and for every method."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import MERGES, FedRAN
from fcl_bench.protocol.combining import as_declared, as_one
from fcl_bench.protocol.fields import SUM, Field, Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Gaussian, Training
from tests.methods.harness import context_of, draw_tasks, shard_of, stream_of, turn
from tests.methods.training_harness import feature_tasks, federation_of
from tests.small_methods import NAMES, made, short_run, trains_by_gradient
from tests.small_runs import run_in

#: Adds up two fields.
SUMMED = as_declared(Uploads({"statistics": {"*": Field((), combine=SUM)}}), "samples")
M = 12
CONTEXT = context_of(6)
#: Samples of five clients; the last has few.
COUNTS = [9, 14, 11, 8, 3]


def uploads_of(method, seed=0):
    """The uploads of one task's clients, and the features (n, M) and columns (n,) of each."""
    [clients] = draw_tasks(np.random.default_rng(seed), 6, [3], [COUNTS])
    [task] = stream_of([clients])
    server, client = method.server(CONTEXT), method.client(CONTEXT)
    server.start_task(task)
    broadcast = server.broadcast(task, 0)
    shards = [shard_of(k, 0, Z, labels) for k, (Z, labels) in enumerate(clients)]
    features = [client.features(client_data, broadcast).numpy() for client_data in shards]
    uploads = [turn(client, client_data, broadcast) for client_data in shards]
    return uploads, [(H, labels) for H, (_, labels) in zip(features, clients, strict=True)]


def grams(held):
    return sum(H.T @ H for H, _ in held)


def test_what_adds_up_is_summed_field_by_field_with_its_samples_and_clients():
    a = Message({"G": torch.ones(2, 2), "n": torch.tensor([1, 2])}, samples=3)
    b = Message({"G": 2 * torch.eye(2), "n": torch.tensor([5, 0])}, samples=4)
    found = SUMMED([a, dataclasses.replace(b, clients=3)])
    assert found["G"].tolist() == [[3, 1], [1, 3]]
    assert found["n"].tolist() == [6, 2]
    assert (found.samples, found.clients) == (7, 4)
    assert a["G"].tolist() == [[1, 1], [1, 1]]  # not in place
    assert found.nbytes == b.nbytes + 8
    # Of samples that one of them does not tell, nobody knows how many there are together.
    assert as_one([a, dataclasses.replace(b, samples=None)], {}).samples is None


def test_a_field_that_an_upload_leaves_out_counts_as_zero():
    a = Message({"n": torch.tensor([1, 0]), "G.0": torch.eye(2)})
    b = Message({"n": torch.tensor([2, 3]), "G.1": torch.ones(2, 2)})
    for found in (SUMMED([a, b]), SUMMED([b, a])):
        assert {name: value.tolist() for name, value in found.items()} == {
            "n": [3, 3],
            "G.0": [[1, 0], [0, 1]],
            "G.1": [[1, 1], [1, 1]],
        }


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_moments_of_clients_with_different_classes_come_over_the_tree(covariance):
    """Full second moments travel for the classes alone that a client has."""
    sizes = [[2, 14, 3, 4, 3], [3, 2, 11, 3, 2]]
    method = FedAvg(
        training=Training(rounds=1, epochs=1, batch_size=8, lr=0.1),
        trains="features",
        ccvr="gaussian",
        gaussian=Gaussian(covariance=covariance, samples=16),
    )
    flat, tree = (
        federation_of(method, context_of(6), feature_tasks(0, [3, 2], sizes), fan_in=fan_in) for fan_in in (None, 2)
    )
    for federation in (flat, tree):
        federation.run(lambda _: None)
    assert sorted(flat.server.replay.known) == [0, 1, 2, 3, 4]
    for column, moments in flat.server.replay.known.items():
        theirs = tree.server.replay.known[column]
        assert theirs.count == moments.count
        # The features are those of the samples, so nothing but the order of the sums differs.
        torch.testing.assert_close(theirs.total, moments.total)
        torch.testing.assert_close(theirs.second, moments.second)


@pytest.mark.parametrize("gamma", [1.0, 0.01])
def test_afls_nodes_send_what_one_client_with_all_samples_and_all_regularisers_would(gamma):
    uploads, held = uploads_of(AFL(gamma=gamma))
    whole = AFL(gamma=gamma).combination(CONTEXT)(uploads)
    H, Y = np.concatenate([H for H, _ in held]), np.concatenate([np.eye(3)[labels] for _, labels in held])
    C = H.T @ H + len(COUNTS) * gamma * np.eye(H.shape[1])
    np.testing.assert_allclose(whole["C"], C, rtol=1e-12)
    np.testing.assert_allclose(whole["W"], np.linalg.solve(C, H.T @ Y), rtol=1e-8, atol=1e-10)
    assert whole.clients == len(COUNTS)


def nested(combine, uploads):
    """((0, 1), (2, 3)), 4: two levels."""
    return combine([combine([combine(uploads[:2]), combine(uploads[2:4])]), uploads[4]])


@pytest.mark.parametrize("merge", ["sequential", "joint", "tree"])
@pytest.mark.parametrize("levels", ["one", "two"])
def test_fedrans_nodes_stay_within_what_they_say_they_dropped(merge, levels):
    """Theorem 1 over a tree: the first dropped eigenvalues of all merges, added to what clients dropped themselves."""
    method = FedRAN(M=M, rank=3, merge=merge)
    uploads, held = uploads_of(method)
    combine = method.combination(CONTEXT)
    whole = nested(combine, uploads) if levels == "two" else combine(uploads)
    first, share, truncations, cut = whole[MERGES].tolist()
    V, sigma = whole["V"].numpy(), whole["sigma"].numpy()
    assert V.shape == (M, 3)
    np.testing.assert_allclose(V.T @ V, np.eye(3), atol=1e-10)
    np.testing.assert_allclose(whole["B"], sum(upload["B"].numpy() for upload in uploads), rtol=1e-12)
    sketches = sum((u["V"] * u["sigma"] ** 2) @ u["V"].T for u in uploads).numpy()
    merged = np.linalg.eigvalsh(sketches - (V * sigma**2) @ V.T)
    assert merged[0] >= -1e-9 * sigma[0] ** 2  # it never says too much
    assert 1e-6 < merged[-1] <= first * (1 + 1e-9)
    local = sum(np.linalg.svd(H, compute_uv=False)[3] ** 2 for H, _ in held if len(H) > 3)
    assert np.linalg.norm(grams(held) - (V * sigma**2) @ V.T, 2) <= (first + local) * (1 + 1e-9)
    # Corollary 2: no upload went through more truncations, none of which dropped a larger share.
    assert 0 < share < 1
    before = float(np.trace(sketches))
    assert before - float((sigma**2).sum()) <= truncations * share * before * (1 + 1e-9)
    assert truncations <= len(uploads)
    # The largest eigenvalue at which somebody before cut off; of two levels, nodes too.
    clients = max(float(u["sigma"][-1]) ** 2 for u in uploads if len(u["sigma"]) == 3)
    assert clients * (1 - 1e-9) <= cut <= sigma[-1] ** 2 * (1 + 1e-9)
    assert levels == "two" or cut == pytest.approx(clients)


def test_fedran_with_all_directions_loses_nothing_in_a_node():
    method = FedRAN(M=M, rank=M)
    uploads, held = uploads_of(method)
    whole = nested(method.combination(CONTEXT), uploads)
    G = (whole["V"] * whole["sigma"] ** 2) @ whole["V"].T
    np.testing.assert_allclose(G, grams(held), rtol=1e-9, atol=1e-9 * np.abs(grams(held)).max())
    assert whole[MERGES][0] <= 1e-9 * np.linalg.norm(grams(held), 2)


def sketched(upload):
    """The estimate of a Gram matrix that an upload of the centred sketch stands for, in NumPy."""
    V, sigma, tau = (upload[name].numpy() for name in ("V", "sigma", "tau"))
    G = (V * np.clip(sigma**2 - tau, 0, None)) @ V.T + tau * np.eye(len(V))
    n, S = upload["n"].numpy(), upload["S"].numpy()
    return G + (S[:, n > 0] / n[n > 0]) @ S[:, n > 0].T


@pytest.mark.parametrize("rank", [0, 2, 5, M])
def test_the_sketchs_nodes_are_off_by_no_more_than_they_say(rank):
    method = CentredSketch(M=M, rank=rank)
    uploads, held = uploads_of(method)
    combine = method.combination(CONTEXT)
    apart, said = [], []
    for whole in (combine(uploads), nested(combine, uploads)):
        exact = sum(sketched(upload) for upload in uploads)
        apart.append(np.linalg.norm(sketched(whole) - exact, 2))
        said.append(float(whole[MERGES]))
        assert apart[-1] <= said[-1] + 1e-9 * np.linalg.norm(exact, 2)
        # What is dropped is spread, not lost.
        assert np.trace(sketched(whole)) == pytest.approx(np.trace(exact), rel=1e-10)
        np.testing.assert_allclose(whole["S"], sum(upload["S"].numpy() for upload in uploads), rtol=1e-12)
        assert whole["V"].shape[1] <= rank
    if rank == M:
        np.testing.assert_allclose(sketched(whole), grams(held), atol=1e-8 * np.abs(grams(held)).max())
    else:
        assert min(apart) > 1e-3
        # One level is the best that can be kept: eigenvalues of what is to be sketched, by NumPy.
        level = said[0]
        assert level == pytest.approx(oracle_error(uploads, rank), rel=1e-8)


def oracle_error(uploads, rank):
    tau = sum(float(upload["tau"]) for upload in uploads)
    rest = sum(sketched(upload) for upload in uploads) - tau * np.eye(M)
    n, S = sum(u["n"].numpy() for u in uploads), sum(u["S"].numpy() for u in uploads)
    rest -= (S / n) @ S.T
    values = np.linalg.eigvalsh(rest)[::-1]
    level = values[rank:].sum() / (M - rank)
    return max(values[rank] - level, level)


@pytest.mark.parametrize("method", [FedRAN(M=10, rank=3, bounds=True), CentredSketch(M=10, rank=2, bounds=True)])
@pytest.mark.parametrize("fan_in", [2, 4])
def test_the_bounds_of_the_audit_hold_over_the_tree(method, fan_in):
    sizes = [[5, 14, 6, 3, 7, 15, 4], [4, 0, 5, 16, 3, 4, 9]]
    run = federation_of(method, context_of(6), feature_tasks(0, [2, 2], sizes), fan_in=fan_in)
    run.run(lambda _: None)
    rows = run.audits["bounds"].rows
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["gram_error"] <= row["gram_bound"]
        assert 0 < row["weight_error"] <= row["weight_bound_sharper"] <= row["weight_bound"]
        if "tail_bound" in row:
            assert row["gram_error"] <= row["trace_error"] <= row["tail_bound"] <= row["tail_bound_R"]
    # Without what the nodes dropped the sketch's would be smaller: it is in there.
    dropped = run.server.losses.first if isinstance(method, FedRAN) else run.server.merge_error
    assert dropped > 0
    assert rows[-1]["gram_bound"] == pytest.approx(run.audits["bounds"].local_error + dropped)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_models_are_averaged_with_the_weights_that_the_server_would_give_them(weighting):
    method = FedAvg(training=Training(weighting=weighting))
    rng = np.random.default_rng(0)
    models = rng.standard_normal((4, 3, 2))
    samples = [5, 1, 9, 3]
    uploads = [Message({"w": torch.from_numpy(w)}, "model", n) for w, n in zip(models, samples, strict=True)]
    combine = method.combination(CONTEXT)
    whole = combine([combine(uploads[:3]), uploads[3]])
    weights = np.array(samples if weighting == "samples" else [1] * 4, dtype=float)
    np.testing.assert_allclose(whole["w"], np.tensordot(weights / weights.sum(), models, 1), rtol=1e-6, atol=1e-7)
    assert (whole.samples, whole.clients, whole["w"].dtype) == (18, 4, torch.float32)


def test_a_robust_aggregate_looks_at_single_models_so_they_are_not_combined():
    assert FedAvg(training=Training(aggregate="median")).combination(CONTEXT) is None


REFUSED = [name for name in NAMES if made(name).combination(CONTEXT) is None]


def test_methods_whose_uploads_are_not_combined_are_refused_in_one_line_before_anything_is_written(tmp_path):
    assert {"stsa_e", "afcl", "fedprotip", "centralised_ridge"} <= set(REFUSED)
    for name in ("stsa_e", "afcl"):
        with pytest.raises(UserError, match=f"transport=tree: method={name} .*cannot be combined.*") as found:
            run_in(tmp_path / name, *short_run(name), "data=digits", "transport=tree")
        assert "transport=in_process, or method=stsa, " in str(found.value)
        assert list(tmp_path.glob("*/runs/*")) == []


COMBINED = [name for name in NAMES if made(name).combination(CONTEXT) is not None]


@pytest.mark.slow_cases("stsa")
@pytest.mark.parametrize(
    "name",
    [name if name in ("stsa", "fedran") else pytest.param(name, marks=pytest.mark.slow) for name in COMBINED],
)
def test_every_method_that_combines_runs_over_the_tree(name, tmp_path):
    """Short runs from end to end: `-m slow` for those that train."""
    images = ("backbone.size=8",) if trains_by_gradient(name) else ()
    small = (*short_run(name), *images, "data=digits", "tasks=2", "clients=5", "cache.enabled=false")
    flat, tree = (run_in(tmp_path, *small, *way).record for way in ((), ("transport=tree", "transport.fan_in=2")))
    assert flat["run_id"] != tree["run_id"]
    assert [level["nodes"] for level in tree["transport"]["levels"]] == [3, 2]
    assert flat["communication"] == tree["communication"]
    assert abs(flat["metrics"]["A_T"] - tree["metrics"]["A_T"]) <= 10
    if all(own.combine == SUM for schema in made(name).uploads(CONTEXT).values() for own in schema.values()):
        assert flat["metrics"] == tree["metrics"]
