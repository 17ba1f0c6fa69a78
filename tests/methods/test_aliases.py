"""Published analytic methods whose federated form is STSA: each recursion, run as published, ends at STSA's W."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.stsa import STSA
from tests.methods.harness import Tasks, context_of, draw_tasks, learn, projection_of, relative_error
from tests.methods.test_recurring_classes import blurred_tasks

#: R (M, M), W (M, C): what the recursions keep.
State = tuple[np.ndarray, np.ndarray]
BATCH = 7


def batches(clients, rng: np.random.Generator):
    """A task's samples (b, d) with their classes (b,), in any order."""
    Z, labels = (np.concatenate(parts) for parts in zip(*clients, strict=True))
    order = rng.permutation(len(labels))
    for begin in range(0, len(order), BATCH):
        chosen = order[begin : begin + BATCH]
        yield Z[chosen], labels[chosen].astype(int)


def knowledge(R: np.ndarray, X: np.ndarray) -> np.ndarray:
    """R <- R - R X'(I + X R X')^-1 X R: Woodbury's identity for (R^-1 + X'X)^-1."""
    return R - R @ X.T @ np.linalg.inv(np.eye(len(X)) + X @ R @ X.T) @ X @ R


def acil(state: State, X: np.ndarray, labels: np.ndarray, old: int) -> State:
    """ACIL: W <- [W - R X'X W, R X'Y], where all classes of a batch are new or, within their phase, were just met.

    `old` is the number of columns before this phase, which a batch adds nothing to but -R X'X W.
    """
    R, W = state
    R = knowledge(R, X)
    Y = np.eye(W.shape[1])[labels]
    assert not Y[:, :old].any()
    return R, np.concatenate([(W - R @ X.T @ X @ W)[:, :old], (W + R @ X.T @ (Y - X @ W))[:, old:]], axis=1)


def gacl(state: State, X: np.ndarray, labels: np.ndarray, old: int) -> State:
    """GACL: exposed classes gain R X'Y beside W - R X'X W (its "exposed class label gain"), unexposed ones are R X'Y.

    A batch may hold both. Which classes are exposed is read off W, whose other columns are still zero.
    """
    R, W = state
    R = knowledge(R, X)
    Y = np.eye(W.shape[1])[labels]
    exposed = W.any(axis=0)
    made = np.zeros_like(W)
    made[:, exposed] = W[:, exposed] - R @ X.T @ X @ W[:, exposed] + R @ X.T @ Y[:, exposed]
    made[:, ~exposed] = R @ X.T @ Y[:, ~exposed]
    return R, made


def online(state: State, X: np.ndarray, labels: np.ndarray, old: int) -> State:
    """AEF-OCL, F-OAL: recursive least squares on a stream of batches, W <- W + R X'(Y - X W)."""
    R, W = state
    R = knowledge(R, X)
    return R, W + R @ X.T @ (np.eye(W.shape[1])[labels] - X @ W)


def fed3r(state: State, X: np.ndarray, labels: np.ndarray, old: int) -> State:
    """Fed3R: A and b add up over clients, and W = A^-1 b; in its recursive form R = A^-1."""
    R, W = state
    A, b = np.linalg.inv(R), np.linalg.solve(R, W)
    A, b = A + X.T @ X, b + X.T @ np.eye(W.shape[1])[labels]
    return np.linalg.inv(A), np.linalg.solve(A, b)


def recursion(
    step: Callable[[State, np.ndarray, np.ndarray, int], State], tasks: Tasks, P: np.ndarray | None, gamma: float
) -> list[np.ndarray]:
    """W after each task, from R = I / gamma and no columns."""
    rng, classifiers = np.random.default_rng(5), []
    M = tasks[0][0][0].shape[1] if P is None else P.shape[1]
    R, W = np.eye(M) / gamma, np.zeros((M, 0))
    for clients in tasks:
        old = W.shape[1]
        seen = max(old, 1 + max(int(labels.max()) for _, labels in clients if len(labels)))
        W = np.pad(W, ((0, 0), (0, seen - old)))
        for Z, labels in batches(clients, rng):
            R, W = step((R, W), Z if P is None else np.maximum(Z @ P, 0), labels, old)
        classifiers.append(W)
    return classifiers


def small(tasks: Tasks) -> Tasks:
    """Features so small that a ridge of 0.1 counts: a recursion's rounding grows with R's condition number."""
    return [[(0.1 * Z, labels) for Z, labels in clients] for clients in tasks]


def new_classes(seed: int) -> Tasks:
    rng = np.random.default_rng(seed)
    return small(draw_tasks(rng, 8, [3, 2, 4], [[40, 0, 3], [25, 12, 8], [1, 30, 20]]))


def recurring_classes(seed: int) -> Tasks:
    return small(blurred_tasks(np.random.default_rng(seed))[0])


@pytest.mark.parametrize("M", [None, 20, 60])
@pytest.mark.parametrize(
    ("step", "made"),
    [
        (acil, new_classes),
        (gacl, new_classes),
        (gacl, recurring_classes),
        (online, new_classes),
        (online, recurring_classes),
        (fed3r, new_classes),
        (fed3r, recurring_classes),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_published_recursion_ends_at_stsa(step, made, M, seed):
    """In batches of 7 over everyone's samples, against sums of whole clients; ACIL's ridge, 0.1."""
    tasks = made(seed)
    server, classifiers = learn(STSA(M=M, gamma=0.1), context_of(8, seed), tasks)
    for ours, theirs in zip(classifiers, recursion(step, tasks, projection_of(server), 0.1), strict=True):
        assert relative_error(ours, theirs) < 1e-10


@pytest.mark.parametrize("made", [new_classes, recurring_classes])
def test_afcl_is_the_online_recursion_too(made):
    tasks = made(1)
    _, classifiers = learn(AFCL(gamma=0.1), context_of(8), tasks)
    for ours, theirs in zip(classifiers, recursion(online, tasks, None, 0.1), strict=True):
        assert relative_error(ours, theirs) < 1e-10


@pytest.mark.parametrize(
    ("alias", "knobs"), [("fed3r", (None, 0.01)), ("acil", (8192, 0.1)), ("gacl", (8192, 0.1))], ids=lambda value: value
)
def test_an_alias_is_stsa_with_its_own_defaults(alias, knobs):
    """The run is recorded as STSA's: the same id, whichever name was typed."""
    settings = load_settings(composed([f"method={alias}"]))
    assert (settings.method.name, settings.method.M, settings.method.gamma) == ("stsa", *knobs)
    M, gamma = ("null" if value is None else value for value in knobs)
    typed = load_settings(composed(["method=stsa", f"method.M={M}", f"method.gamma={gamma}"]))
    assert settings.identity() == typed.identity()
    assert load_settings(composed([f"method={alias}", "method.gamma=3"])).method.gamma == 3
