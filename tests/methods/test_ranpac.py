"""FedRanPAC against cross-validation that holds the samples themselves, and what its choices promise."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.engine.validation import BadUpload
from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form import ranpac
from fcl_bench.methods.closed_form.ranpac import RanPAC, RanPACServer
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.typed import typed_instance
from tests.methods import ranpac_oracle as oracle
from tests.methods.harness import (
    Tasks,
    context_of,
    dealt,
    draw_tasks,
    learn,
    on_wire,
    projection_of,
    random_tasks,
    relative_error,
    shard_of,
    stream_of,
    take_in,
    turn,
)

#: A grid on which neither fit of the oracle's is singular.
NARROW = [10.0**k for k in range(-2, 6)]
CHOICES = [("gcv", "all"), ("held_out", "all"), ("held_out", "task")]
choices = pytest.mark.parametrize(("ridge", "scope"), CHOICES)


def recurring(tasks: Tasks, rng: np.random.Generator) -> Tasks:
    """The same tasks, where later ones hold samples of a class of the first too."""
    (Z, labels), *others = tasks[0]
    again = Z[:6] + rng.standard_normal((6, Z.shape[1])), labels[:6]
    later = [[*clients, again] for clients in tasks[1:]]
    return [[(Z, labels), *others], *later]


@choices
@pytest.mark.parametrize("M", [None, 20, 90])
@pytest.mark.parametrize("seed", range(3))
def test_every_choice_and_solution_agree_with_the_oracle(seed, M, ridge, scope, monkeypatch):
    """Classes come back, some clients hold nothing, and M is below or above the number of samples."""
    monkeypatch.setattr(ranpac, "GRID", NARROW)
    rng = np.random.default_rng(seed)
    tasks = recurring(draw_tasks(rng, 8, [3, 2, 2], [[30, 0, 9], [25, 14, 1], [0, 12, 30]]), rng)
    server, classifiers = learn(RanPAC(M=M, ridge=ridge, scope=scope), context_of(8, seed), tasks)
    assert isinstance(server, RanPACServer)
    expected = oracle.ranpac(tasks, projection_of(server), ridge, seed, scope=scope, grid=NARROW)
    assert server.report()["ridges"] == pytest.approx([chosen for chosen, _ in expected])
    for ours, (_, theirs) in zip(classifiers, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-8


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 60),
    beta=st.sampled_from([0.05, 0.5, 100]),
    choice=st.sampled_from(CHOICES),
)
def test_neither_partition_nor_order_changes_the_choice_or_the_solution(seed, clients, beta, choice):
    rng = np.random.default_rng(seed)
    tasks = draw_tasks(rng, 5, [3, 2], [[60], [50]])
    method = RanPAC(M=30, ridge=choice[0], scope=choice[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranpac, "GRID", NARROW)
        whole, together = learn(method, context_of(5), tasks)
        parted, apart = learn(method, context_of(5), dealt(rng, tasks, clients, beta))
    assert parted.report()["ridges"] == whole.report()["ridges"]
    for ours, theirs in zip(apart, together, strict=True):
        assert relative_error(ours, theirs.numpy()) < 1e-8


@choices
def test_the_solution_is_that_of_stsa_with_the_chosen_ridge(ridge, scope):
    """To the bit where the sums travel together, to rounding where they travel by parts."""
    tasks = random_tasks(2, 30)[:1]
    server, [W] = learn(RanPAC(M=40, ridge=ridge, scope=scope), context_of(8), tasks)
    _, [same] = learn(STSA(M=40, gamma=server.report()["ridges"][-1]), context_of(8), tasks)
    assert torch.equal(W, same) if ridge == "gcv" else relative_error(W, same.numpy()) < 1e-9


@pytest.mark.parametrize("ridge", [3.0, "auto"])
def test_a_number_and_auto_are_those_of_stsa(ridge):
    tasks = random_tasks(1, 12)
    server, ours = learn(RanPAC(M=20, ridge=ridge), context_of(8), tasks)
    other, theirs = learn(STSA(M=20, gamma=ridge), context_of(8), tasks)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert server.report()["ridges"][-1] == other.ridge
    assert "held_out_errors" not in server.report()


def linear_labels(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels that are linear in the features, without noise: the features are Y and noise, turned."""
    labels = np.arange(n) % 3
    noise = rng.standard_normal((n, 5))
    turned = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    return np.concatenate([np.eye(3)[labels], noise], axis=1) @ turned, labels


def noise_labels(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which the features say nothing: with each sample its opposite is of the same class."""
    half, labels = rng.standard_normal((n // 2, 8)), rng.integers(0, 3, n // 2)
    return np.concatenate([half, -half]), np.concatenate([labels, labels])


@choices
@pytest.mark.parametrize(("labels", "expected"), [(linear_labels, 1e-8), (noise_labels, 1e8)])
def test_perfect_labels_take_the_least_ridge_and_noise_the_largest(labels, expected, ridge, scope):
    Z, columns = labels(np.random.default_rng(0), 210)
    tasks = [[(Z[:120], columns[:120]), (Z[120:], columns[120:])]]
    server, _ = learn(RanPAC(M=None, ridge=ridge, scope=scope), context_of(8), tasks)
    assert server.report()["ridges"] == [expected]


def test_a_choice_may_be_inside_the_grid():
    tasks = draw_tasks(np.random.default_rng(0), 8, [3], [[40, 30]])
    server, _ = learn(RanPAC(M=None), context_of(8), tasks)
    assert 1e-8 < server.report()["ridges"][0] < 1e8


def test_the_reported_error_is_that_of_the_samples_held_out():
    tasks = draw_tasks(np.random.default_rng(3), 8, [3], [[50, 30]])
    server, _ = learn(RanPAC(M=None, ridge="held_out"), context_of(8), tasks)
    [chosen], [error] = server.report()["ridges"], server.report()["held_out_errors"]
    Z, labels = oracle.pooled(tasks)
    fold = oracle.folds_of(Z, 0, 5)
    [expected] = oracle.cross_validation(Z, np.eye(3)[labels], fold, [0], [chosen])
    assert error == pytest.approx(expected / (fold == 0).sum(), rel=1e-9)


def test_a_fold_without_samples_is_told_and_the_ridge_is_then_a_share_of_the_mean_eigenvalue(caplog):
    """One sample can't be both learnt from and held out."""
    Z, labels = np.random.default_rng(0).standard_normal((1, 8)), np.zeros(1, dtype=np.int64)
    with caplog.at_level(logging.WARNING):
        server, [W] = learn(RanPAC(M=None, ridge="held_out"), context_of(8), [[(Z, labels)]])
    assert server.report()["ridges"] == [pytest.approx(0.01 * (Z**2).sum() / 8)]
    assert server.report()["held_out_errors"] == [None]
    assert "a fold has no sample" in caplog.text
    assert torch.isfinite(W).all()


def test_a_badly_chosen_ridge_is_what_gcv_is_for():
    """Features of length 1, for which STSA's default of 1e4 gives next to nothing but the class sizes."""
    rng = np.random.default_rng(4)
    tasks = draw_tasks(rng, 8, [4, 4], [[200, 30], [40, 20]])
    tasks = [[(Z / np.linalg.norm(Z, axis=1, keepdims=True), labels) for Z, labels in clients] for clients in tasks]
    Z, labels = oracle.pooled(tasks)
    accuracy = {}
    for name, method in {"stsa": STSA(M=64), "ranpac": RanPAC(M=64)}.items():
        server, _ = learn(method, context_of(8), tasks)
        accuracy[name] = (server.predict(torch.from_numpy(Z)).argmax(dim=1).numpy() == labels).mean()
    assert accuracy["ranpac"] > accuracy["stsa"] + 0.1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("ridge", "times", "more"), [(1.0, 1, 0), ("auto", 1, 0), ("gcv", 1, 8), ("held_out", 2, 8)])
def test_the_upload_has_the_documented_size(ridge, times, more, packed):
    method = RanPAC(M=40, ridge=ridge)
    context = context_of(8, wire="float32", gram="packed" if packed else "full")
    tasks = draw_tasks(np.random.default_rng(0), 8, [5], [[30]])
    [task] = stream_of(tasks)
    server = method.server(context)
    server.start_task(task)
    upload = turn(method.client(context), shard_of(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    square = 40 * 41 // 2 if packed else 40 * 40
    assert on_wire(upload, method, context).nbytes == times * 4 * (square + 40 * 5) + more


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@choices
def test_coarse_wires_leave_a_useful_classifier(ridge, scope, wire):
    tasks = draw_tasks(np.random.default_rng(5), 8, [3, 2], [[60, 50], [50, 1]])
    context = context_of(8, wire=wire, gram="packed", columns="held")
    server, _ = learn(RanPAC(M=30, ridge=ridge, scope=scope), context, tasks)
    Z, labels = oracle.pooled(tasks)
    assert (server.predict(torch.from_numpy(Z)).argmax(dim=1).numpy() == labels).mean() > 0.8


def test_sums_of_a_part_without_samples_are_refused():
    method, context = RanPAC(M=8, ridge="held_out"), context_of(6)
    tasks = draw_tasks(np.random.default_rng(7), 6, [3], [[30]])
    [task] = stream_of(tasks)
    server = method.server(context)
    server.start_task(task)
    upload = turn(method.client(context), shard_of(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    wrong = upload.with_tensors({**upload, "n": torch.tensor([0, 30], dtype=torch.int32)})
    with pytest.raises(BadUpload, match="C_0 is not zero, and n says that there is no sample"):
        take_in(server, 0, on_wire(wrong, method, context), task)


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"ridge": "gcvv"}, "method.ridge=gcvv is not known"),
        ({"ridge": 0}, "method.ridge=0.0 is out of range"),
        ({"ridge": "held_out", "scope": "client"}, "method.scope=client is not known"),
        ({"scope": "task"}, "method.scope=task says nothing with method.ridge=gcv"),
    ],
)
def test_impossible_knobs_are_refused(knobs, told):
    with pytest.raises(UserError, match=told):
        typed_instance(RanPAC, knobs, "method")


def test_the_grid_is_by_powers_of_ten():
    assert list(ranpac.GRID) == oracle.GRID
