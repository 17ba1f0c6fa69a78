"""The benchmark suite's plain code gives the library's results; only the time may differ."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import head_training
import pytest
import torch
from suite import made, peers
from suite.bench_methods import METHODS, learned, plain_task
from suite.bench_stsa_e_server import joined, one_task

from fcl_bench.linalg.spectral import summarise
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.algebra.merging import merge
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.protocol.context import Context, WireFormat
from fcl_bench.training.knobs import Training

SIZES = SimpleNamespace(n=30, d=8, M=20, r=20, K=3, C=4)


def exact(inputs: int) -> Context:
    """A problem whose wire rounds nothing."""
    return dataclasses.replace(made.context(inputs, torch.float64), wire=WireFormat(torch.float64))


def shards_of(case: SimpleNamespace) -> list:
    return [made.client_data(case.n, case.d, case.C, torch.float64, client=client) for client in range(case.K)]


def close(ours_: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours_, theirs, rtol=1e-8, atol=1e-9 * float(theirs.abs().max()))


def gram_of(sketch) -> torch.Tensor:
    V, sigma = sketch
    return (V * sigma.square()) @ V.T


@pytest.mark.parametrize("method", ["stsa", "afl", "afcl", "fedran", "centralised_ridge"])
def test_a_task_in_plain_code_gives_the_same_classifier(method):
    case = SimpleNamespace(method=method, **vars(SIZES))
    known, shards = exact(case.d), shards_of(case)
    side = plain_task(case, shards, known)
    assert side is not None
    server = learned(METHODS[method](case), known, shards, case.C)
    close(server.model()["W"], side.prepare()())


def test_rank_one_updates_give_stsa_es_gram_matrix():
    method, known = STSAE(M=20, dummy_clients=3), exact(8)
    sent = made.uploads(method, known, shards_of(SIZES), made.task(SIZES.C))
    server = method.server(known)
    one_task(server, sent, SIZES.C)
    close(server.estimate.matrix, peers.scatter(*joined(sent)))


def test_a_share_of_the_rank_one_updates_is_the_first_of_them():
    C, n = torch.rand(6, 5, 2, dtype=torch.float64), torch.randint(1, 9, (5, 2))
    first = (int(n[:, 0].sum()) - 1) / 4
    three = sum(first * torch.outer(C[:, j, 0], C[:, j, 0]) / int(n[j, 0]) for j in range(3))
    close(peers.scatter(C, n, 3), three)


def test_groups_summed_by_sample_are_what_a_client_sends():
    method, known = STSAE(M=20, dummy_clients=3), exact(8)
    client_data = shards_of(SIZES)[0]
    (sent,) = made.uploads(method, known, [client_data], made.task(SIZES.C))
    C, n = joined([sent])
    H = peers.random_features(client_data.inputs, made.context_projection(known, 20))
    # Into whichever groups the samples fall, their sums and counts add up to the classes'.
    plain, counts = peers.group_sums(H, client_data.labels, torch.arange(30) % 3, 3, SIZES.C)
    close(C.sum(dim=1), plain.sum(dim=1))
    assert torch.equal(n.sum(dim=0), counts.sum(dim=0))
    close(plain.sum(dim=1), peers.class_sums(H, client_data.labels, SIZES.C))


@pytest.mark.parametrize("n", [15, 40])
def test_the_svd_gives_the_summary(n):
    H = made.random_features(n, 8, 20, torch.float64)
    close(gram_of(summarise(H, 6)[0]), gram_of(peers.summary(H, 6)))


def test_the_papers_merge_gives_ours():
    first, second = made.spectra(2, 30, 6, torch.float64)
    close(gram_of(merge([first, second], 6)[0]), gram_of(peers.merge(first, second, 6)))


def test_an_inverse_for_every_client_gives_afls_classifier():
    method, known = AFL(), exact(8)
    sent = made.uploads(method, known, shards_of(SIZES), made.task(SIZES.C))
    server = method.server(known)
    server.start_task(made.task(SIZES.C))
    for client, message in enumerate(sent):
        server.absorb(client, message)
    server.finish_task()
    theirs = peers.aggregated([(one["C"], one["W"]) for one in sent], method.gamma)
    assert theirs is not None
    close(server.W, theirs)


def test_the_pairwise_update_of_the_paper_is_an_inverse_for_every_client():
    method = AFL()
    sent = made.uploads(method, exact(8), shards_of(SIZES), made.task(SIZES.C))
    inverse = peers.aggregated([(one["C"], one["W"]) for one in sent], method.gamma, last=False)
    pairwise = peers.weighted([(one["C"], torch.linalg.inv(one["C"]), one["W"]) for one in sent])
    assert inverse is not None
    assert pairwise is not None
    close(pairwise, inverse)


def test_plain_scores_are_the_servers():
    known = exact(8)
    server = learned(STSA(M=20), known, shards_of(SIZES), SIZES.C)
    Z = made.features(300, 8, 4, torch.float64, seed=9)
    close(server.predict(Z), peers.predict(Z, server.model()["projection"], server.W))


@pytest.mark.slow
def test_all_sides_of_training_on_features_end_with_the_same_model():
    training = Training(rounds=2, epochs=2, batch_size=8, lr=0.1, weight_decay=0.0)
    setting = head_training.Setting(clients=3, samples=20, classes=5, inputs=7, training=training, together=2)
    models = {name: side() for name, side in head_training.sides_of(setting).items()}
    assert set(models) == {"rounds", "training", "rounds*", "training*", "plain", "loader"}
    start = head_training.head_of(setting.network().heads[0])
    for model in models.values():
        for name, value in models["rounds"].items():
            torch.testing.assert_close(model[name], value, rtol=1e-5, atol=1e-6)
            assert not torch.allclose(model[name], start[name], rtol=1e-3)


def test_the_table_has_a_row_for_each_side_and_ratios_of_each_repetition():
    times = {"wall": [1.0, 1.0, 4.0], "processor": [1.0, 2.0, 1.0]}
    found = dict.fromkeys(("rounds", "training", "loader"), times)
    found["plain"] = {"wall": [3.0, 5.0, 8.0], "processor": [3.0, 2.0, 5.0]}
    lines = head_training.table(found).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["rounds", "training", "loader", "plain"]
    assert lines[-1].split()[-4:] == ["3.00", "(3.00)", "3.00", "(3.00)"]
