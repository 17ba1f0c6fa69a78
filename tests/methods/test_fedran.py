"""FedRAN against the oracle, and the properties that the paper and methods promise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.fedran import FedRAN, upload_bytes
from fcl_bench.protocol.context import WIRE_DTYPES, Task, WireFormat
from tests.methods import fedran_oracle as oracle
from tests.methods.harness import context_of, draw_tasks, learn, on_wire, shard_of, turn


def random_case(number):
    """A configuration: n < M and n > M, empty and single-sample clients, M none, all merges, ranks from 1 to M."""
    rng = np.random.default_rng(number)
    inputs = int(rng.choice([5, 16, 40]))
    M = [24, 60, 150, None][number % 4]
    width = inputs if M is None else M
    rank = int(rng.integers(1, width + 1))
    tasks, clients = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    sizes = rng.choice([0, 1, 3, 20, 90], size=(tasks, clients))
    sizes[:, 0] = np.maximum(sizes[:, 0], 8)
    if clients > 2:
        sizes[0, 1], sizes[-1, 2] = 0, 1
    data = draw_tasks(rng, inputs, [int(c) for c in rng.integers(1, 5, tasks)], sizes.tolist(), rng.choice([0.0, 1.5]))
    ridge, merge = float(10.0 ** rng.integers(-3, 3)), list(oracle.SPATIAL)[number // 4 % 2]
    return FedRAN(M=M, rank=rank, ridge=ridge, merge=merge), context_of(inputs, number), data


@pytest.mark.slow_cases("6", "10", "13", "14", "18", "30")
@pytest.mark.parametrize("number", range(36))
def test_scores_agree_with_the_oracle(number):
    method, context, tasks = random_case(number)
    server, classifiers = learn(method, context, tasks)
    projection = server.model().get("projection")
    P = None if projection is None else projection.numpy()
    expected = oracle.fedran(tasks, P, method.rank, method.ridge, method.merge)
    Z = np.random.default_rng(99).standard_normal((50, context.inputs))
    H = Z if P is None else np.maximum(Z @ P, 0)
    for ours, theirs in zip(classifiers, expected, strict=True):
        scores = H @ theirs
        assert np.abs(H @ ours.numpy() - scores).max() <= 1e-8 * np.abs(scores).max()
    predicted = server.predict(torch.from_numpy(Z)).numpy()
    np.testing.assert_allclose(predicted, scores, rtol=0, atol=1e-8 * np.abs(scores).max())


def test_cases_cover_the_corners():
    sizes = [[len(labels) for clients in random_case(i)[2] for _, labels in clients] for i in range(36)]
    widths = [random_case(i)[0].dimension(random_case(i)[1]) for i in range(36)]
    assert any(0 in case for case in sizes)
    assert any(1 in case for case in sizes)
    assert any(max(case) > width for case, width in zip(sizes, widths, strict=True))
    assert any(max(case) < width for case, width in zip(sizes, widths, strict=True))


def exact_statistics(tasks, P):
    H = np.concatenate([np.maximum(Z @ P, 0) for clients in tasks for Z, _ in clients])
    labels = np.concatenate([labels for clients in tasks for _, labels in clients])
    return H, H.T @ np.eye(labels.max() + 1)[labels]


@pytest.mark.parametrize("merge", list(oracle.SPATIAL))
def test_rank_of_the_data_gives_the_full_ridge_solution(merge):
    """Nothing is truncated, so W = (G + lambda I)^-1 B (Eq. 4), whatever the merge."""
    rng = np.random.default_rng(0)
    tasks = draw_tasks(rng, 6, [2, 3], [[30, 1, 12], [5, 40, 9]])
    method = FedRAN(M=32, rank=32, ridge=0.5, merge=merge)
    server, (*_, W) = learn(method, context_of(6), tasks)
    H, B = exact_statistics(tasks, server.model()["projection"].numpy())
    full = np.linalg.solve(H.T @ H + 0.5 * np.eye(32), B)
    np.testing.assert_allclose(W.numpy(), full, rtol=1e-8, atol=1e-10 * np.abs(full).max())


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), clients=st.integers(1, 40))
def test_at_full_rank_partition_and_order_do_not_matter(seed, clients):
    rng = np.random.default_rng(seed)
    [[(Z, labels)]] = draw_tasks(rng, 5, [4], [[60]])
    owner = rng.integers(0, clients, 60)
    parts = [(Z[owner == k], labels[owner == k]) for k in rng.permutation(clients)]
    method = FedRAN(M=20, rank=20, ridge=1.0)
    _, [whole] = learn(method, context_of(5), [[(Z, labels)]])
    _, [split] = learn(method, context_of(5), [parts])
    torch.testing.assert_close(split, whole, rtol=1e-8, atol=1e-9 * float(whole.abs().max()))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), rank=st.integers(1, 12), merge=st.sampled_from(list(oracle.SPATIAL)))
def test_class_sums_are_exact_at_any_rank(seed, rank, merge):
    rng = np.random.default_rng(seed)
    tasks = draw_tasks(rng, 4, [2, 1, 3], [[9, 1], [5, 4], [12, 3]])
    server, _ = learn(FedRAN(M=12, rank=rank, ridge=1.0, merge=merge), context_of(4), tasks)
    _, B = exact_statistics(tasks, server.model()["projection"].numpy())
    np.testing.assert_allclose(server.state_dict()["B"].numpy(), B, rtol=1e-10, atol=1e-10)


def test_duplicate_samples_and_dead_features_leave_no_arbitrary_directions():
    """Singular values that are zero to rounding would let 1/lambda amplify arbitrary vectors."""
    rng = np.random.default_rng(1)
    Z = np.repeat(rng.standard_normal((3, 8)), 5, axis=0)
    Z[:, 2:5] = 0
    labels = np.arange(15) % 2
    server, [W] = learn(FedRAN(M=40, rank=30, ridge=1e-6), context_of(8), [[(Z, labels), (Z[:1], labels[:1])]])
    assert len(server.state_dict()["sigma"]) == 3
    H, B = exact_statistics([[(Z, labels), (Z[:1], labels[:1])]], server.model()["projection"].numpy())
    full = np.linalg.solve(H.T @ H + 1e-6 * np.eye(40), B)
    np.testing.assert_allclose(H @ W.numpy(), H @ full, atol=1e-8)


class LargestTensor(TorchDispatchMode):
    """Fails on any tensor with both sides at least `side`."""

    def __init__(self, side):
        super().__init__()
        self.side = side

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2:
                assert min(tensor.shape[-2:]) < self.side, (func, tensor.shape)
        return result


@pytest.mark.parametrize("merge", list(oracle.SPATIAL))
def test_no_m_by_m_matrix_is_made(merge):
    """As long as a client has fewer samples, and a merge fewer columns, than M."""
    tasks = draw_tasks(np.random.default_rng(2), 10, [2, 2], [[30, 25, 40, 8], [12, 33, 7, 20]])
    with LargestTensor(side=200):
        learn(FedRAN(M=200, rank=20, merge=merge), context_of(10), tasks)


@pytest.mark.parametrize("wire", list(WIRE_DTYPES))
@pytest.mark.parametrize("samples", [3, 50])
def test_the_message_has_the_size_of_equation_11(wire, samples):
    context = context_of(8, wire=wire)
    method = FedRAN(M=40, rank=12)
    Z = np.random.default_rng(4).standard_normal((samples, 8))
    labels = np.arange(samples) % 2
    server = method.server(context)
    task = Task(0, range(5), 5)
    server.start_task(task)
    client_data = shard_of(0, 0, Z, labels)
    message = on_wire(turn(method.client(context), client_data, server.broadcast(task, 0)), method, context)
    assert message.nbytes == upload_bytes(40, min(12, samples), 5, context.wire)
    if wire in ("float32", "float64"):
        rank, width = min(12, samples), 4 if wire == "float32" else 8
        assert message.nbytes == width * (40 * rank + rank + 40 * 5)


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(1, 60_000),
    M=st.integers(1, 64),
    classes=st.integers(1, 20),
    wire=st.sampled_from(list(WIRE_DTYPES)),
)
def test_a_byte_budget_gives_the_largest_rank_that_fits(budget, M, classes, wire):
    context = context_of(8, wire=wire)
    method = FedRAN(M=M, rank=None, budget_bytes=budget)
    rank = method.feasible_rank(context, classes)
    if rank < 1:
        with pytest.raises(UserError, match=str(upload_bytes(M, 1, classes, context.wire))):
            method.check(context, [classes])
        assert upload_bytes(M, 1, classes, context.wire) > budget
        return
    method.check(context, [classes])
    assert upload_bytes(M, rank, classes, context.wire) <= budget
    assert rank == M or upload_bytes(M, rank + 1, classes, context.wire) > budget
    if wire in ("float32", "float64"):  # Eq. 12 as printed
        b = 4 if wire == "float32" else 8
        assert rank == min(M, int((budget / b - M * classes) // (M + 1)))


@pytest.mark.parametrize("wire", list(WIRE_DTYPES))
@pytest.mark.parametrize("columns", ["task", "held"])
@pytest.mark.parametrize("ridge", [1e-3, "gcv"])
@pytest.mark.parametrize("room", [0, 7, 8, 15, 16])
def test_no_upload_is_larger_than_the_budget(wire, columns, ridge, room):
    """The number of samples, and the numbers of the columns, count as well."""
    context = context_of(8, wire=wire, columns=columns)
    plain = upload_bytes(20, 4, 3, WireFormat(WIRE_DTYPES[wire]))
    method = FedRAN(M=20, rank=None, ridge=ridge, budget_bytes=plain + room)
    [[(Z, labels)]] = draw_tasks(np.random.default_rng(0), 8, [3], [[30]])
    server, client = method.server(context), method.client(context)
    server.start_task(Task(0, range(3), 3))
    upload = turn(client, shard_of(0, 0, Z, labels), server.broadcast(Task(0, range(3), 3), 0))
    upload = on_wire(upload, method, context)
    beside = 8 * (ridge == "gcv") + 16 * (columns == "held")
    rank = 4 if beside <= room else 3
    assert len(upload["sigma"]) == method.feasible_rank(context, 3) == rank
    assert upload.nbytes == upload_bytes(20, rank, 3, WireFormat(WIRE_DTYPES[wire])) + beside <= plain + room


def test_a_budget_binds_uploads_not_what_the_server_keeps():
    """A first task of many classes leaves room for few directions; later ones have room for more and lose nothing."""
    tasks = draw_tasks(np.random.default_rng(8), 10, [20, 2, 20], [[60, 60], [60, 60], [60, 60]])
    context = context_of(10, wire="float32")
    method = FedRAN(M=64, rank=None, budget_bytes=upload_bytes(64, 5, 20, WireFormat(torch.float32)), ridge=1.0)
    server, _ = learn(method, context, tasks)
    assert [method.feasible_rank(context, classes) for classes in (20, 2, 20)] == [5, 22, 5]
    assert len(server.state_dict()["sigma"]) == 22
    fixed = FedRAN(M=64, rank=40, budget_bytes=method.budget_bytes, ridge=1.0)
    server, _ = learn(fixed, context, tasks)
    assert len(server.state_dict()["sigma"]) == 40


def test_scores_on_the_wire_types_approach_the_exact_ones():
    tasks = draw_tasks(np.random.default_rng(5), 8, [3, 3], [[40, 30], [50, 20]])
    Z = torch.randn(30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    method = FedRAN(M=40, rank=40, ridge=1.0)
    scores = {
        wire: learn(method, context_of(8, wire=wire), tasks)[0].predict(Z)
        for wire in ("float64", "float32", "float16", "bfloat16")
    }
    errors = {
        wire: float((s - scores["float64"]).abs().max() / scores["float64"].abs().max()) for wire, s in scores.items()
    }
    assert errors["float32"] < 1e-4
    assert errors["float32"] < errors["float16"] < errors["bfloat16"] < 0.5


def test_clients_may_run_in_any_order():
    """An upload depends on the client's shard and the broadcast alone, not on who ran before."""
    [clients] = draw_tasks(np.random.default_rng(7), 8, [3], [[20, 9, 1, 14]])
    method, context = FedRAN(M=30, rank=10), context_of(8)
    server, task = method.server(context), Task(0, range(3), 3)
    server.start_task(task)
    broadcast = server.broadcast(task, 0)

    def uploads(order):
        client = method.client(context)
        shards = {k: shard_of(k, 0, *clients[k]) for k in order}
        return {k: turn(client, shards[k], broadcast) for k in order}

    forward, backward = uploads([0, 1, 2, 3]), uploads([3, 2, 1, 0])
    for k, message in forward.items():
        assert all(torch.equal(tensor, backward[k][name]) for name, tensor in message.items())


def test_different_seeds_draw_different_projections():
    first, second = (FedRAN(M=20, rank=5).server(context_of(4, seed)).model()["projection"] for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("merge", list(oracle.SPATIAL))
def test_the_floor_is_the_smallest_kept_eigenvalue(merge):
    """W = V (diag(s^2) + lambda)^-1 V'B + (I - V V')B / (s_r^2 + lambda)."""
    tasks = draw_tasks(np.random.default_rng(11), 8, [3, 2], [[40, 30], [25, 20]])
    drop, _ = learn(FedRAN(M=30, rank=6, ridge=0.5, merge=merge), context_of(8), tasks)
    floor, [*_, W] = learn(FedRAN(M=30, rank=6, ridge=0.5, merge=merge, complement="floor"), context_of(8), tasks)
    V, sigma, B = (drop.state_dict()[name].numpy() for name in ("V", "sigma", "B"))
    assert len(sigma) == 6
    G = V * sigma**2 @ V.T + sigma[-1] ** 2 * (np.eye(30) - V @ V.T)
    np.testing.assert_allclose(W, np.linalg.solve(G + 0.5 * np.eye(30), B), rtol=1e-8, atol=1e-10)
    assert torch.equal(floor.state_dict()["V"], drop.state_dict()["V"])


def test_pseudo_labels_enter_the_statistics_as_labels_do():
    """FedRAN-SSL on labelled + accepted samples is FedRAN on those samples with those labels."""
    [[(Z, labels)]] = draw_tasks(np.random.default_rng(12), 8, [3], [[60]])
    method, context = FedRAN(M=30, rank=10, ssl=True, tau=0.9), context_of(8)
    client, server = method.client(context), method.server(context)
    client_data = shard_of(0, 0, Z[:15], labels[:15], Z[15:])
    guesses = client.pseudo_labels(client_data)
    accepted = guesses.numpy() >= 0
    assert 0 < accepted.sum() < 45
    augmented = client_data.with_pseudo_labels(guesses)
    assert (len(augmented.labels), len(augmented.unlabelled)) == (15 + accepted.sum(), 45 - accepted.sum())
    task = Task(0, range(3), 3)
    server.start_task(task)
    message = turn(client, augmented, server.broadcast(task, 0))
    H = np.maximum(np.concatenate([Z[:15], Z[15:][accepted]]) @ server.model()["projection"].numpy(), 0)
    known = np.concatenate([labels[:15], guesses.numpy()[accepted]])
    np.testing.assert_allclose(message["B"], H.T @ np.eye(3)[known], rtol=1e-12)
    assert FedRAN(M=30, rank=10).client(context).pseudo_labels(client_data) is None


def test_the_projection_as_a_matrix_is_the_projection_as_a_seed():
    tasks = draw_tasks(np.random.default_rng(13), 8, [3], [[20, 9]])
    method = FedRAN(M=30, rank=10)
    _, [seed] = learn(method, context_of(8), tasks)
    _, [matrix] = learn(method, context_of(8, projection="matrix"), tasks)
    assert torch.equal(seed, matrix)
    task, server = Task(0, range(3), 3), method.server(context_of(8, projection="matrix"))
    assert server.broadcast(task, 0).nbytes == 8 * 8 * 30 + 3 * 4


def test_under_a_budget_the_floor_is_where_clients_cut_off():
    """The server then keeps more directions than any client sent, of eigenvalues far below what clients dropped."""
    tasks = draw_tasks(np.random.default_rng(14), 20, [3, 2], [[60, 50], [40, 55]], offset=1)
    context = context_of(20, wire="float64")
    budget = upload_bytes(40, 5, 3, WireFormat(torch.float64))
    method = FedRAN(M=40, rank=40, ridge=0.1, budget_bytes=budget, complement="floor")
    server, [*_, W] = learn(method, context, tasks)
    P = server.model()["projection"].numpy()
    cuts = [
        np.linalg.svd(np.maximum(Z @ P, 0), compute_uv=False)[method.feasible_rank(context, classes) - 1] ** 2
        for classes, clients in zip((3, 2), tasks, strict=True)
        for Z, _ in clients
    ]
    V, sigma, B = (server.state_dict()[name].numpy() for name in ("V", "sigma", "B"))
    assert server.floor == pytest.approx(max(cuts))
    assert sigma[-1] ** 2 < server.floor
    G = V * np.maximum(sigma**2, server.floor) @ V.T + server.floor * (np.eye(40) - V @ V.T)
    np.testing.assert_allclose(W, np.linalg.solve(G + 0.1 * np.eye(40), B), rtol=1e-8, atol=1e-10)


def test_kept_eigenvalues_that_float32_can_not_resolve_are_told_and_not_divided_by(caplog):
    tasks = draw_tasks(np.random.default_rng(15), 8, [3, 2], [[90, 80], [85, 95]], offset=3)
    coarse = type(context_of(8))(**{**vars(context_of(8)), "dtype": torch.float32})
    scores = {}
    H = None
    for name, context in (("float64", context_of(8)), ("float32", coarse)):
        for complement in ("drop", "floor"):
            method = FedRAN(M=60, rank=60, ridge=1e-9, complement=complement)
            data = [[(Z.astype(name), labels) for Z, labels in clients] for clients in tasks]
            server, [*_, W] = learn(method, context, data)
            H = np.maximum(tasks[0][0][0] @ server.model()["projection"].double().numpy(), 0) if H is None else H
            scores[name, complement] = (H @ W.double().numpy()).argmax(axis=1)
    assert (scores["float32", "floor"] == scores["float64", "floor"]).mean() > 0.9
    assert any(
        "ill-conditioned" in record.message and "condition number" in record.message for record in caplog.records
    )


@pytest.mark.parametrize("times", [0.5, 2.0, 9.0, 11.0])
def test_a_warning_comes_at_ten_times_the_noise(times):
    """As from the other solvers (docs/reference/wire.md): noise is then a tenth of an eigenvalue that is divided by."""
    context = dataclasses.replace(context_of(4), dtype=torch.float32)
    server = FedRAN(M=None, rank=4, ridge=1e-30).server(context)
    noise = torch.finfo(torch.float32).eps
    server.B, server.ridge = torch.eye(4), 1e-30
    server.V, server.sigma = torch.eye(4), torch.tensor([1.0, 0.5, 0.1, (times * noise) ** 0.5])
    trouble = server.solution().trouble
    assert trouble.startswith("the system is ill-conditioned") == (times < 10)
