"""The Gaussian sketch against its oracle, and its properties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.algebra.class_scatter import ClassScatter, _eigenpairs
from fcl_bench.methods.closed_form.algebra.coding import coded, decoded
from fcl_bench.methods.closed_form.algebra.random_features import OwnCovariances, relu_covariance, relu_sums
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketch, GaussianSketchServer
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.typed import typed_instance
from tests.methods import gaussian_sketch_oracle as oracle
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

SKETCH = GaussianSketch(M=25, rank=4, class_rank=3, ridge=1.0, scale_scores=False)


def knobs(**changes) -> GaussianSketch:
    return dataclasses.replace(SKETCH, **changes)


def gram_of(server) -> np.ndarray:
    assert isinstance(server, GaussianSketchServer)
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
        expected = oracle.gaussian_sketch(tasks, P, rank, class_rank, mix, ridge)
        for ours, theirs in zip(classifiers, expected, strict=True):
            assert relative_error(ours, theirs) < 1e-8
        G, B, terms = oracle.states(tasks, P, rank, class_rank, mix)[-1]
        assert np.abs(gram_of(server) - G).max() < 1e-11 * np.abs(G).max()
        assert np.abs(server.B.numpy() - B).max() < 1e-11 * np.abs(B).max()
        # Every upload's rest is replaced by something positive semidefinite, in the oracle as here.
        assert all(np.linalg.eigvalsh(term)[0] > -1e-10 * np.abs(G).max() for term in terms)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 40), columns=st.integers(0, 6), spread=st.floats(0, 6))
def test_coding_keeps_factors_within_half_a_step(seed, rows, columns, spread):
    rng = np.random.default_rng(seed)
    F = torch.from_numpy(rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-spread, 0, columns))
    codes, step = coded(F, 0.25)
    found = decoded(codes, step, rows, columns)
    assert found.shape == F.shape
    assert ((found - F).abs() <= step / 2 * (1 + 1e-12)).all()
    # What the server's limit on the energy relies on.
    assert (found.abs() <= 2 * F.abs() * (1 + 1e-12)).all()
    np.testing.assert_allclose(found.numpy(), oracle.coded(F.numpy()), rtol=1e-12, atol=0)


def test_columns_of_one_length_take_about_four_bits_an_entry():
    codes, _ = coded(torch.from_numpy(np.random.default_rng(0).standard_normal((2000, 30))), 0.25)
    # The entropy of a normal variable in steps of 0.25 deviations: log2(sqrt(2 pi e) / 0.25) = 4.05 bits.
    assert 4.05 < 8 * len(codes) / 60000 < 4.2


def test_bytes_that_are_no_factor_are_refused_within_bounded_memory():
    codes, step = coded(torch.ones(1000, 5, dtype=torch.float64), 0.25)
    assert decoded(codes, step, 1000, 5) is not None
    assert decoded(codes, step, 1000, 4) is None, "more columns than allowed"
    assert decoded(codes, step, 999, 5) is None, "no whole columns"
    assert decoded(codes[:-1], step, 1000, 5) is None, "cut"
    assert decoded(torch.cat([codes, codes]), step, 1000, 5) is None, "something follows"
    assert decoded(torch.full((9,), 255, dtype=torch.uint8), step, 1000, 5) is None, "not deflated"
    assert decoded(torch.zeros(0, dtype=torch.uint8), step, 1000, 5) is None, "nothing"
    bomb, _ = coded(torch.zeros(10**6, 20, dtype=torch.float64), 0.25)
    assert decoded(bomb, step, 1000, 5) is None


def test_class_sums_of_gaussians_are_those_of_many_draws():
    rng = np.random.default_rng(3)
    P, root = rng.standard_normal((4, 12)), rng.standard_normal((4, 4))
    Sigma, mu = root @ root.T, rng.standard_normal(4)
    Z = rng.multivariate_normal(mu, Sigma, size=400_000)
    own = OwnCovariances(torch.ones(1, dtype=torch.float64), torch.zeros(1, 4, 0, dtype=torch.float64))
    n = torch.tensor([10])
    sums, energies = torch.from_numpy(10 * mu).unsqueeze(1), torch.tensor([10 * np.trace(Sigma)])
    found = relu_sums(torch.from_numpy(P), torch.from_numpy(Sigma), own, sums, n, energies)
    np.testing.assert_allclose(found[:, 0].numpy(), 10 * np.maximum(Z @ P, 0).mean(axis=0), rtol=0.02)
    # A client whose samples are all alike has no spread, whatever the class has.
    alone = relu_sums(torch.from_numpy(P), torch.from_numpy(Sigma), own, sums, n, torch.zeros(1).double())
    np.testing.assert_allclose(alone[:, 0].numpy(), 10 * np.maximum(mu @ P, 0), atol=1e-12)


@pytest.mark.parametrize("class_rank", [0, 3, 8])
def test_the_scatter_has_the_exact_diagonal_where_coding_leaves_room(class_rank):
    tasks = recurring(1)
    server, _ = learn(knobs(M=14, class_rank=class_rank), context_of(8), tasks)
    exact, _ = learn(knobs(M=14, class_rank=0), context_of(8), tasks)
    # Coding may raise a row of the factors above its energy, never lower the diagonal below it.
    raised = np.diag(server.scatter) / np.diag(exact.scatter)
    assert (raised > 1 - 1e-12).all()
    assert raised.max() < 1.3
    assert np.linalg.eigvalsh(server.scatter)[0] > -1e-12 * np.trace(server.scatter)


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


def test_a_solver_that_fails_is_replaced(monkeypatch):
    """LAPACK's divide and conquer fails on some scatters of few directions."""

    def failing(*_):
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr("fcl_bench.methods.closed_form.algebra.class_scatter.torch.linalg.eigh", failing)
    values, vectors = _eigenpairs(torch.diag(torch.tensor([3.0, 1.0, 2.0])).double().expand(2, 3, 3))
    assert values.tolist() == 2 * [[1.0, 2.0, 3.0]]
    assert vectors.shape == (2, 3, 3)


def gram_error(method, tasks: Tasks) -> float:
    """How far a server's estimate is from H'H, relative to it."""
    server, _ = learn(method, context_of(8), tasks)
    H = hidden(tasks, projection_of(server))
    return np.linalg.norm(server.gram().numpy() - H.T @ H) / np.linalg.norm(H.T @ H)


def test_classes_of_different_spread_are_estimated_better_by_covariances_of_their_own():
    """What `class_rank` is for: two Gaussian classes that spread in different directions, dropped wholly (rank 0)."""
    rng = np.random.default_rng(0)
    labels = np.arange(3000) % 2
    Z = rng.standard_normal((3000, 8)) * np.where(labels[:, None] == 0, [3, 3] + 6 * [0.3], 6 * [0.3] + [3, 3])
    tasks = [[(Z[:1500], labels[:1500]), (Z[1500:], labels[1500:])]]
    method = knobs(M=60, rank=0, mix=0.0)
    error = {rank: gram_error(dataclasses.replace(method, class_rank=rank), tasks) for rank in (0, 2)}
    assert error[2] < 0.6 * error[0]


def test_gaussian_classes_are_estimated_far_better_than_evenly():
    """What it is for: one task of many Gaussian samples, dropped wholly (rank 0), against the exact Gram matrix."""
    tasks = draw_tasks(np.random.default_rng(0), 8, [3], [[1500, 1500]])
    even = gram_error(CentredSketch(M=60, rank=0), tasks)
    assert gram_error(knobs(M=60, rank=0, class_rank=8, mix=0.0), tasks) < 0.3 * even


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(0, 25),
    class_rank=st.integers(0, 8),
    mix=st.floats(0, 1),
)
def test_no_eigenvalue_is_below_zero_and_the_deviations_keep_their_energy(seed, rank, class_rank, mix):
    tasks = random_tasks(seed, 9)
    server, _ = learn(knobs(rank=rank, class_rank=class_rank, mix=mix), context_of(8), tasks)
    G = gram_of(server)
    assert np.abs(G - G.T).max() <= 1e-14 * np.abs(G).max()
    assert np.linalg.eigvalsh(G)[0] > -1e-12 * np.trace(G)
    expected = oracle.states(tasks, projection_of(server), rank, class_rank, mix)[-1][0]
    assert np.trace(G) == pytest.approx(np.trace(expected), rel=1e-10)


def test_class_sums_along_the_sketch_are_measured():
    """In the span of V nothing is left to the model, although the factor is coded."""
    tasks = draw_tasks(np.random.default_rng(0), 8, [3], [[60]])
    server, _ = learn(knobs(M=25, rank=6), context_of(8), tasks)
    exact, _ = learn(STSA(M=25, gamma=1.0), context_of(8), tasks)
    [(_, labels)] = tasks[0]
    V, sigma, _, _, _ = oracle.sketch_of(hidden(tasks, projection_of(server)), labels, 6)
    F = oracle.coded(V * sigma)
    error = (server.B - exact.B).numpy()
    assert np.abs(F.T @ error).max() < 1e-10 * np.abs(F.T @ exact.B.numpy()).max()
    assert 1e-4 < np.linalg.norm(error) / np.linalg.norm(exact.B.numpy()) < 0.05


def test_no_factor_is_kept_once_a_task_is_over():
    """All that remains is G, B, Sigma and numbers."""
    tasks = draw_tasks(np.random.default_rng(6), 8, [2], [[20, 9, 30]])
    server, _ = learn(SKETCH, context_of(8), tasks)
    matrices = {name: tuple(tensor.shape) for name, tensor in server.state_dict().items() if tensor.ndim == 2}
    assert matrices == {"B": (25, 2), "estimate.G": (25, 25), "scatter": (8, 8), "drawn.means": (0, 8)}
    assert server._waiting == []


def test_samples_alone_in_their_class_leave_nothing_to_sketch():
    """A = 0, Sigma = 0, Q = 0: the class sums of the inputs are everything, and the solution exact."""
    rng = np.random.default_rng(2)
    tasks = [[(rng.standard_normal((3, 8)), np.arange(3)), (rng.standard_normal((1, 8)), np.array([0]))]]
    server, [W] = learn(knobs(M=25), context_of(8), tasks)
    _, [exact] = learn(STSA(M=25, gamma=1.0), context_of(8), tasks)
    assert relative_error(W, exact.numpy()) < 1e-10
    assert not server.state_dict()["scatter"].any()


def test_inputs_without_variance_and_dead_features_stay_finite():
    """Features that no sample moves: s_i = 0 for some random features, and all of them for one class."""
    rng = np.random.default_rng(3)
    Z = rng.standard_normal((30, 8))
    Z[:, 2:] = 0
    tasks = [[(Z[:20], np.arange(20) % 2), (Z[20:], np.arange(10) % 2)]]
    context, method = context_of(8), knobs(M=25)
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
    assert np.isfinite(gram_of(server)).all()
    assert torch.isfinite(server.W).all()


@pytest.mark.parametrize("options", [{}, {"projection": "matrix"}])
@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rank", [12, 30])
def test_coarse_wires_leave_the_estimate_positive(rank, wire, options):
    tasks = draw_tasks(np.random.default_rng(7), 8, [3, 2], [[30, 12, 1], [25, 0, 9]])
    for mix in (0.0, 0.3):
        method = knobs(M=30, rank=rank, class_rank=8, mix=mix)
        server, classifiers = learn(method, context_of(8, wire=wire, **options), tasks)
        G = gram_of(server)
        exact = np.square(hidden(tasks, projection_of(server))).sum()
        assert np.linalg.eigvalsh(G)[0] > -1e-9
        assert np.trace(G) == pytest.approx(exact, rel=0.1)
        assert all(torch.isfinite(W).all() for W in classifiers)


def upload_of(method: GaussianSketch, samples: int, classes: int, **wire):
    """A server at its first task, and one upload as it travels."""
    context = context_of(8, **wire)
    Z = np.random.default_rng(4).standard_normal((samples, 8))
    tasks = [[(Z, np.arange(samples) % classes)]]
    [task] = stream_of(tasks)
    server = method.server(context)
    server.start_task(task)
    upload = turn(method.client(context), shard_of(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    return server, upload, on_wire(upload, method, context)


@pytest.mark.parametrize(("rank", "class_rank"), [(6, 3), (0, 3), (6, 0), (40, 8)])
@pytest.mark.parametrize("samples", [30, 5])
def test_the_upload_has_the_documented_size(rank, class_rank, samples):
    """docs/methods/gaussian_sketch.md, in float32 and in bfloat16; the codes have a size of their own."""
    M, d, c = 40, 8, 5
    r = min(rank, samples - c)
    for wire in ("float32", "bfloat16"):
        _, upload, sent = upload_of(knobs(M=M, rank=rank, class_rank=class_rank), samples, c, wire=wire)
        codes = len(upload["codes"]) + len(upload["codes_z"])
        if wire == "float32":
            assert sent.nbytes == codes + 4 * (r * c + d * c + d + 3 * c + 3)
        else:
            assert sent.nbytes == codes + 2 * r * c + 4 * c * (r > 0) + 2 * d * c + 4 * c + 2 * d + 4 + 4 * (3 * c + 3)


def test_uploads_that_contradict_themselves_are_refused():
    server, upload, _ = upload_of(knobs(M=40, rank=6), 30, 5)
    assert server.objection(upload) == ""
    other, _ = coded(torch.ones(40, 5, dtype=torch.float64), 0.25)
    for name, wrong, said in (
        ("codes", other, "codes are not those of 6 columns"),
        ("codes", upload["codes"][:-1], "codes are not those of 6 columns"),
        ("codes_z", other, "codes_z are not those of"),
        ("steps", 3 * upload["steps"], "codes have more than 4 times the energy that E says"),
        ("steps", upload["steps"] * torch.tensor([1, 3]), "codes_z have more than 4 times the energy that E_z says"),
        ("E_z", upload["E_z"] / 9, "D_z and E_z have different sums"),
        ("widths", upload["widths"] - 1, "codes_z are not those of"),
        ("steps", 1e-30 * upload["steps"], "less than 1e-18"),
        ("E", 1e6 * upload["E"], "E is more than inputs of this E_z give"),
        ("D_z", 1000 * upload["D_z"], "D_z and E_z have different sums"),
        ("n", 0 * upload["n"], "it is of no sample"),
        ("n", upload["n"].clamp_max(1), "of which n says fewer than 2 samples"),
        ("S_z", 1e152 * upload["S_z"], "whose random features are out of range"),
    ):
        assert said in server.objection(upload.with_tensors({**upload, name: wrong}))


def test_class_sums_that_fit_no_samples_have_a_bounded_effect():
    """T has no form of its own; no sum of ReLU(P'z) is longer than ||P|| times the sum of |z|."""
    server, upload, _ = upload_of(knobs(M=40, rank=6), 30, 5)
    lie = upload.with_tensors({**upload, "T": 1e12 * upload["T"]})
    assert server.objection(lie) == ""
    server.absorb(0, lie)
    server.finish_task()
    Z = np.random.default_rng(4).standard_normal((30, 8))
    most = np.linalg.norm(projection_of(server), 2) * np.sqrt(6 * np.square(Z).reshape(6, 5, 8).sum(axis=(0, 2)))
    # What lies outside the sketch's span is the model's, and honest.
    assert (np.linalg.norm(server.B.numpy(), axis=0) < 2 * most).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mix": 1.5}, "method.mix=1.5 is out of range"),
        ({"mix": -0.1}, "method.mix=-0.1 is out of range"),
        ({"class_rank": -1}, "method.class_rank=-1 is out of range"),
    ],
)
def test_impossible_knobs_are_refused(given, said):
    with pytest.raises(UserError, match=said):
        typed_instance(GaussianSketch, given, "method")


def test_what_does_not_fit_the_context_is_refused():
    with pytest.raises(UserError, match="method.class_rank=9 is more than the 8 backbone's features"):
        knobs(class_rank=9).check(context_of(8), [2])
    with pytest.raises(UserError, match="method.rank=26 is more than the 25 random features"):
        knobs(rank=26).check(context_of(8), [2])
    for linear in ({"M": None}, {"activation": "none"}):
        with pytest.raises(UserError, match="method=gaussian_sketch needs random features of ReLU"):
            knobs(**linear).check(context_of(8), [2])
    with pytest.raises(UserError, match="method.class_rank=500 needs .* for the covariances of a task's classes"):
        knobs(class_rank=500).check(dataclasses.replace(context_of(8), inputs=512), [10**6])
    crowd = dataclasses.replace(context_of(8), clients=10**12)
    with pytest.raises(UserError, match="method.rank=4 needs .* for the factors of 1000000000000 clients"):
        SKETCH.check(crowd, [2])
