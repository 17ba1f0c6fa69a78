"""The centred sketch with the Gaussian remainder against its oracle, and its properties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.algebra.class_scatter import ClassScatter
from fcl_bench.methods.closed_form.algebra.random_features import OwnCovariances, relu_covariance
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch, GaussianRemainderServer
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.typed import typed_instance
from tests.methods import gaussian_remainder_oracle as oracle
from tests.methods.harness import (
    Tasks,
    context_of,
    draw_tasks,
    learn,
    on_wire,
    over_the_wire,
    projection_of,
    random_tasks,
    relative_error,
    shard_of,
    stream_of,
    turn,
)

GAUSSIAN = CentredSketch(M=25, rank=4, class_rank=3, remainder="gaussian")


def knobs(**changes) -> CentredSketch:
    return dataclasses.replace(GAUSSIAN, **changes)


def gram_of(server) -> np.ndarray:
    assert isinstance(server, GaussianRemainderServer)
    return server.gram().numpy()


def hidden(tasks: Tasks, P: np.ndarray) -> np.ndarray:
    """H of all samples."""
    return np.concatenate([np.maximum(Z @ P, 0) for clients in tasks for Z, _ in clients])


def recurring(seed: int) -> Tasks:
    """Three tasks; the second has a class of the first again, and the third no new one."""
    tasks = draw_tasks(np.random.default_rng(seed), 8, [3, 2], [[20, 1, 12], [15, 0, 9]])
    (Z, labels), *others = tasks[1]
    labels = labels.copy()
    labels[:4] = 1
    return [tasks[0], [(Z, labels), *others], [(Z[::-1].copy(), labels[::-1].copy()), tasks[0][2]]]


@pytest.mark.slow_cases("0-14-8-1.0", "1-14-8-0.1", "0-40-8-0.1", "0-40-8-1.0", "1-40-8-0.1")
@pytest.mark.parametrize("mix", [0.1, 1.0])
@pytest.mark.parametrize(("M", "rank"), [(14, 0), (14, 8), (14, 14), (40, 8)])
@pytest.mark.parametrize("seed", range(2))
def test_scores_agree_with_the_oracle(seed, M, rank, mix):
    """At rank 0, at 8, and at the rank of everything; classes that come back and classes of one sample among them."""
    tasks, ridge = recurring(seed) if seed else random_tasks(seed, 9), 10.0**-seed
    for class_rank in (0, 1, 3, 8) if (M, rank) == (14, 8) else (3,):
        method = knobs(M=M, rank=rank, class_rank=class_rank, mix=mix, ridge=ridge)
        server, classifiers = learn(method, context_of(8, seed), tasks)
        P = projection_of(server)
        for ours, theirs in zip(
            classifiers, oracle.gaussian_remainder(tasks, P, rank, class_rank, mix, ridge), strict=True
        ):
            assert relative_error(ours, theirs) < 1e-8
        G, _, terms = oracle.states(tasks, P, rank, class_rank, mix)[-1]
        assert np.abs(gram_of(server) - G).max() < 1e-11 * np.abs(G).max()
        # Every upload's rest is replaced by something positive semidefinite, in the oracle as here.
        assert all(np.linalg.eigvalsh(term)[0] > -1e-10 * np.abs(G).max() for term in terms)


@pytest.mark.parametrize("class_rank", [0, 3, 8])
def test_the_scatter_has_the_exact_diagonal(class_rank):
    tasks = recurring(1)
    server, _ = learn(knobs(M=14, class_rank=class_rank), context_of(8), tasks)
    exact, _ = learn(knobs(M=14, class_rank=8), context_of(8), tasks)
    assert np.diag(server.scatter) == pytest.approx(np.diag(exact.scatter))
    assert np.linalg.eigvalsh(server.scatter)[0] > -1e-12 * np.trace(server.scatter)
    # Nothing is dropped at the full rank.
    assert (relative_error(server.scatter, exact.scatter.numpy()) < 1e-10) == (class_rank == 8)


def test_classes_that_share_one_covariance_need_none_of_their_own():
    """Where every class has the common shape, `class_rank` adds nothing to what one Sigma says."""
    rng = np.random.default_rng(1)
    like = torch.zeros(8, 8, dtype=torch.float64)
    root = torch.from_numpy(rng.standard_normal((8, 8)))
    Sigma, sizes = root @ root.T, torch.tensor([40, 7])
    classes = ClassScatter(like, 2)
    # All directions of 40 Sigma and of 7 Sigma.
    values, vectors = torch.linalg.eigh(Sigma)
    U = torch.cat([vectors * (n * values).sqrt() for n in sizes], dim=1)
    classes.add(U, torch.tensor([8, 8], dtype=torch.int32), sizes * Sigma.trace())
    b, L = classes.beside(Sigma, sizes, 3)
    torch.testing.assert_close(b, torch.ones(2, dtype=torch.float64))
    assert L.square().sum() < 1e-14 * Sigma.trace()
    P, means = torch.from_numpy(rng.standard_normal((8, 14))), torch.from_numpy(rng.standard_normal((8, 2)))
    shared = OwnCovariances(torch.ones_like(b), torch.zeros_like(L))
    expected = relu_covariance(P, Sigma, shared, means, sizes)
    torch.testing.assert_close(relu_covariance(P, Sigma, OwnCovariances(b, L), means, sizes), expected)


def test_classes_of_different_spread_are_estimated_better_by_covariances_of_their_own():
    """What `class_rank` is for: two Gaussian classes that spread in different directions, dropped wholly (rank 0)."""
    rng = np.random.default_rng(0)
    labels = np.arange(3000) % 2
    Z = rng.standard_normal((3000, 8)) * np.where(labels[:, None] == 0, [3, 3] + 6 * [0.3], 6 * [0.3] + [3, 3])
    tasks = [[(Z[:1500], labels[:1500]), (Z[1500:], labels[1500:])]]
    error = {}
    for class_rank in (0, 2):
        method = knobs(M=60, rank=0, class_rank=class_rank, mix=0.0)
        server, _ = learn(method, context_of(8), tasks)
        H = hidden(tasks, projection_of(server))
        error[class_rank] = np.linalg.norm(server.gram().numpy() - H.T @ H) / np.linalg.norm(H.T @ H)
    assert error[2] < 0.5 * error[0]


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(0, 25),
    class_rank=st.integers(0, 8),
    mix=st.floats(0, 1),
)
def test_the_trace_is_kept_at_every_rank_and_no_eigenvalue_is_below_zero(seed, rank, class_rank, mix):
    tasks = random_tasks(seed, 9)
    server, _ = learn(knobs(rank=rank, class_rank=class_rank, mix=mix), context_of(8), tasks)
    G = gram_of(server)
    assert np.trace(G) == pytest.approx(np.square(hidden(tasks, projection_of(server))).sum(), rel=1e-10)
    assert np.abs(G - G.T).max() <= 1e-14 * np.abs(G).max()
    assert np.linalg.eigvalsh(G)[0] > -1e-12 * np.trace(G)


@pytest.mark.parametrize("seed", range(3))
def test_mix_one_is_the_isotropic_remainder(seed):
    tasks = random_tasks(seed, 9)
    even, W = learn(knobs(M=40, mix=1.0, ridge=1.0), context_of(8), tasks)
    isotropic, expected = learn(knobs(M=40, remainder="isotropic", ridge=1.0), context_of(8), tasks)
    np.testing.assert_allclose(gram_of(even), isotropic.gram().numpy(), rtol=0, atol=1e-11 * gram_of(even).trace())
    for ours, theirs in zip(W, expected, strict=True):
        assert relative_error(ours, theirs.numpy()) < 1e-8


@pytest.mark.parametrize("rank", [45, 90])
@pytest.mark.parametrize("mix", [0.0, 0.3])
def test_a_rank_that_covers_every_client_gives_stsa(rank, mix):
    tasks = draw_tasks(np.random.default_rng(0), 8, [3, 2], [[40, 1, 12], [25, 0, 30]])
    _, ours = learn(knobs(M=90, rank=rank, mix=mix, ridge=1.0), context_of(8), tasks)
    _, exact = learn(STSA(M=90, gamma=1.0), context_of(8), tasks)
    for W, theirs in zip(ours, exact, strict=True):
        assert relative_error(W, theirs.numpy()) < 1e-8


def test_gaussian_classes_are_estimated_far_better_than_evenly():
    """What it is for: one task of many Gaussian samples, dropped wholly (rank 0), against the exact Gram matrix."""
    rng = np.random.default_rng(0)
    tasks = draw_tasks(rng, 8, [3], [[1500, 1500]])
    error = {}
    for remainder, mix in (("isotropic", 0.3), ("gaussian", 0.0), ("gaussian", 0.3)):
        server, _ = learn(knobs(M=60, rank=0, class_rank=8, remainder=remainder, mix=mix), context_of(8), tasks)
        H = hidden(tasks, projection_of(server))
        error[remainder, mix] = np.linalg.norm(server.gram().numpy() - H.T @ H) / np.linalg.norm(H.T @ H)
    assert error["gaussian", 0.0] < 0.1 * error["isotropic", 0.3]
    assert error["gaussian", 0.3] == pytest.approx(0.3 * error["isotropic", 0.3], rel=0.1)


def test_no_factor_is_kept_once_a_task_is_over():
    """All that remains is G, B, Sigma and numbers."""
    tasks = draw_tasks(np.random.default_rng(6), 8, [2], [[20, 9, 30]])
    server, _ = learn(GAUSSIAN, context_of(8), tasks)
    matrices = {name: tuple(tensor.shape) for name, tensor in server.state_dict().items() if tensor.ndim == 2}
    assert matrices == {"B": (25, 2), "estimate.G": (25, 25), "scatter": (8, 8)}
    assert server._sketches == []


def test_samples_alone_in_their_class_leave_nothing_to_sketch():
    """A = 0, Sigma = 0, Q = 0: the class sums are everything, and the solution exact."""
    rng = np.random.default_rng(2)
    tasks = [[(rng.standard_normal((3, 8)), np.arange(3)), (rng.standard_normal((1, 8)), np.array([0]))]]
    server, [W] = learn(knobs(M=25, ridge=1.0), context_of(8), tasks)
    _, [exact] = learn(STSA(M=25, gamma=1.0), context_of(8), tasks)
    assert relative_error(W, exact.numpy()) < 1e-10
    assert not server.state_dict()["scatter"].any()


def test_inputs_without_variance_and_dead_features_stay_finite():
    """Features that no sample moves: s_i = 0 for some random features, and all of them for one class."""
    rng = np.random.default_rng(3)
    Z = rng.standard_normal((30, 8))
    Z[:, 2:] = 0
    tasks = [[(Z[:20], np.arange(20) % 2), (Z[20:], np.arange(10) % 2)]]
    context, method = context_of(8), knobs(M=25, ridge=1.0)
    server = method.server(context)
    server.random_features.projection[:2, :5] = 0  # these five see the dead inputs only
    [task] = stream_of(tasks)
    server.start_task(task)
    broadcast = {**server.broadcast(task, 0), "projection": server.random_features.projection}
    del broadcast["seed"]
    message = server.broadcast(task, 0).with_tensors(broadcast)
    for k, (inputs, labels) in enumerate(tasks[0]):
        upload = turn(method.client(context), shard_of(k, 0, inputs, labels), message)
        server.absorb(k, over_the_wire(upload, method, context))
    server.finish_task()
    G = gram_of(server)
    assert np.isfinite(G).all()
    assert np.trace(G) == pytest.approx(np.square(hidden(tasks, projection_of(server))).sum(), rel=1e-10)
    assert torch.isfinite(server.W).all()


@pytest.mark.parametrize("options", [{}, {"factors": "int8"}, {"columns": "held"}, {"projection": "matrix"}])
@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rank", [12, 30])
def test_coarse_wires_leave_the_estimate_positive(rank, wire, options):
    """Rounding may make e negative, V oblique, and sigma^2 smaller than what is spread evenly."""
    tasks = draw_tasks(np.random.default_rng(7), 8, [3, 2], [[30, 12, 1], [25, 0, 9]])
    for mix in (0.0, 0.3):
        method = knobs(M=30, rank=rank, class_rank=8, ridge=1.0, mix=mix)
        server, classifiers = learn(method, context_of(8, wire=wire, **options), tasks)
        G = gram_of(server)
        exact = np.square(hidden(tasks, projection_of(server))).sum()
        assert np.linalg.eigvalsh(G)[0] > -1e-9
        assert np.trace(G) == pytest.approx(exact, rel=0.02)
        assert all(torch.isfinite(W).all() for W in classifiers)


def upload_of(method: CentredSketch, samples: int, classes: int, **wire):
    context = context_of(8, **wire)
    Z = np.random.default_rng(4).standard_normal((samples, 8))
    tasks = [[(Z, np.arange(samples) % classes)]]
    [task] = stream_of(tasks)
    server = method.server(context)
    server.start_task(task)
    upload = turn(method.client(context), shard_of(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    return on_wire(upload, method, context)


@pytest.mark.parametrize(("rank", "class_rank"), [(6, 3), (0, 3), (6, 0), (40, 8)])
@pytest.mark.parametrize("samples", [30, 5])
def test_the_upload_has_the_documented_size(rank, class_rank, samples):
    """docs/methods/centred_sketch.md, in float32, in bfloat16, and with 8-bit factors."""
    M, d, c = 40, 8, 5
    r, k = min(rank, samples - c), c * min(class_rank, samples // c - 1)
    method = knobs(M=M, rank=rank, class_rank=class_rank)
    values = M * r + r + 1 + M * c + c + d * c + d * k + k + 2 * c + d
    assert upload_of(method, samples, c, wire="float32").nbytes == 4 * values
    sums = 2 * M * c + 4 * c + 4 * c + 2 * d * c + 4 * c + 8 * c + 2 * d + 4
    half = 2 * M * r + 8 * r + 4 + 2 * d * k + 8 * k
    assert upload_of(method, samples, c, wire="bfloat16").nbytes == half + sums
    eighth = M * r + 4 * r + 4 + d * k + 4 * k
    assert upload_of(method, samples, c, wire="bfloat16", factors="int8").nbytes == eighth + sums


def test_the_papers_conventions_count_what_is_sent():
    """At the nominal ranks, in float32 as STSA's table: one upload of 30 samples reaches them."""
    method = knobs(M=40, rank=6, class_rank=3)
    sent = upload_of(method, 30, 5, wire="float32").nbytes
    assert method.paper_bytes(context_of(8), [5])["stsa_mib"] * 2**20 == pytest.approx(sent)


def test_the_isotropic_message_is_as_before():
    upload = upload_of(knobs(remainder="isotropic"), 30, 5, wire="float32")
    assert set(upload) == {"V", "sigma", "tau", "S", "n"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mix": 1.5}, "method.mix=1.5 is out of range"),
        ({"mix": -0.1}, "method.mix=-0.1 is out of range"),
        ({"class_rank": -1}, "method.class_rank=-1 is out of range"),
        ({"remainder": "gauss"}, "method.remainder=gauss is not known"),
    ],
)
def test_impossible_knobs_are_refused(given, said):
    with pytest.raises(UserError, match=said):
        typed_instance(CentredSketch, given, "method")


def test_what_does_not_fit_the_context_is_refused():
    with pytest.raises(UserError, match="method.class_rank=9 is more than the backbone's 8 features"):
        knobs(class_rank=9).check(context_of(8), [2])
    for linear in ({"M": None}, {"activation": "none"}):
        with pytest.raises(UserError, match="method.remainder=gaussian needs random features of ReLU"):
            knobs(**linear).check(context_of(8), [2])
        knobs(class_rank=9, remainder="isotropic", **linear).check(context_of(8), [2])
    with pytest.raises(UserError, match="method.class_rank=500 needs .* for the covariances of a task's classes"):
        knobs(class_rank=500).check(dataclasses.replace(context_of(8), inputs=512), [10**6])
    crowd = dataclasses.replace(context_of(8), clients=10**12)
    with pytest.raises(UserError, match="method.rank=4 needs .* for the factors of 1000000000000 clients"):
        GAUSSIAN.check(crowd, [2])
    knobs(remainder="isotropic").check(crowd, [2])
