"""LGA: its loss against the plain oracle, and what it shares with GLFC."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.exemplars.glfc import GLFC, Compensated
from fcl_bench.methods.exemplars.lga import GROUPS, LGA, Balanced
from fcl_bench.training.network import Heads
from fcl_bench.typed import typed_instance
from tests.methods import lga_oracle
from tests.methods.classical_harness import assert_as_written_down
from tests.methods.classical_harness import training as on_features
from tests.methods.fedicarl_harness import SIZES, learnt, training
from tests.methods.whole_runs import model_of, same

# The loss -------------------------------------------------------------------------------------------------------------

HEADS = {1: Heads(((0, 1), (2, 3)), (2, 3)), 2: Heads(((0, 1), (2,), (3, 4)), (3, 4))}
#: The third task brings class 1 back.
BACK = Heads(((0, 1), (2,), (3, 4)), (1, 3, 4))


def known(heads: Heads, learnt) -> torch.Tensor:
    found = torch.zeros(len(heads.logits), dtype=torch.bool)
    found[list(learnt)] = True
    return found


def balanced(heads: Heads, learnt, old, groups: str = "separate", lam: float = 1.0) -> Balanced:
    """With an old model whose logits are given; None: there is none."""
    return Balanced(heads, False, known(heads, learnt), None if old is None else lambda _: old, groups, lam)


def of_ours(objective, q: np.ndarray, y: np.ndarray):
    scores = torch.from_numpy(q).requires_grad_()
    loss = objective.score_loss(scores, torch.from_numpy(y), torch.zeros(len(q)))
    loss.backward()
    return loss.item(), scores.grad.numpy()


def drawn(heads: Heads, seed: int):
    rng = np.random.default_rng(seed)
    columns, old = len(heads.logits), len(heads.logits) - len(heads.columns[-1])
    return 2 * rng.standard_normal((9, columns)), rng.integers(0, columns, 9), 2 * rng.standard_normal((9, old))


def first_of(heads: Heads) -> list[int]:
    return [task for task, columns in enumerate(heads.columns) for _ in columns]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("heads", "learnt"),
    [(HEADS[1], {0, 1}), (HEADS[1], {1}), (HEADS[2], {0, 1, 2}), (HEADS[2], {2}), (BACK, {0, 1, 2})],
)
@pytest.mark.parametrize("lam", [1.0, 0.3])
def test_the_loss_is_the_equations(heads, learnt, groups, lam):
    q, y, old = drawn(heads, 0)
    task, first = len(heads.columns) - 1, first_of(heads)
    for logits in (old, None):
        given = None if logits is None else torch.from_numpy(logits)
        found, gradient = of_ours(balanced(heads, learnt, given, groups, lam), q, y)
        expected = lga_oracle.loss(q, y.tolist(), logits, first, learnt, task, groups, lam)
        assert found == pytest.approx(expected, rel=1e-12)
        slope = lga_oracle.gradient(q, y.tolist(), logits, first, learnt, task, groups, lam)
        np.testing.assert_allclose(gradient, slope, atol=1e-15)


def test_the_oracles_gradient_is_that_of_its_loss_with_the_weights_held():
    """By central differences in a column that no weight depends on."""
    heads, learnt = HEADS[2], {0, 1, 2}
    q, y, old = drawn(heads, 3)
    rest = (y.tolist(), old, first_of(heads), learnt, 2, "cumulative", 0.7)
    slope = lga_oracle.gradient(q, *rest)
    for row in range(len(q)):
        column = next(c for c in range(q.shape[1]) if c != y[row])
        step = np.zeros_like(q)
        step[row, column] = 1e-6
        up, down = (lga_oracle.loss(q + s, *rest) for s in (step, -step))
        assert (up - down) / 2e-6 == pytest.approx(slope[row, column], abs=1e-9)


def test_the_loss_by_hand():
    """Two classes, t = 1, one learnt; q = 0 throughout, so g = .5 ** .5, w = 1, BCE = log 2; the old model says 0."""
    heads = Heads(((0,), (1,)), (1,))
    loss, _ = of_ours(balanced(heads, {0}, torch.zeros(2, 1).double(), lam=0.7), np.zeros((2, 2)), np.array([0, 1]))
    assert loss == pytest.approx(0.7 * 2 * np.log(2), rel=1e-12)


def test_the_exponent_and_the_groups_by_hand():
    """t = 1: .25 and .81 of a learnt class, .49 of a new one: g = .5, .9, .7 and w = 5/7, 9/7, 1."""
    heads = Heads(((0,), (1,)), (1,))
    q = np.zeros((3, 2))
    for row, (column, p) in enumerate([(0, 0.25), (0, 0.81), (1, 0.49)]):
        q[row, column] = np.log((1 - p) / p)
    found = balanced(heads, {0}, None).weights(torch.from_numpy(q), torch.tensor([0, 0, 1]))
    np.testing.assert_allclose(found, [5 / 7, 9 / 7, 1.0], rtol=1e-12)


def test_what_is_learnt_worse_weighs_more_in_the_distillation_too():
    """The gradient of the old model's columns scales with w; in GLFC it does not."""
    heads, y = Heads(((0,), (1,)), (1,)), np.array([0, 0])
    q = np.array([[2.0, 0.0], [-2.0, 0.0]])
    old = torch.full((2, 1), 1.0, dtype=torch.float64)
    w = balanced(heads, {0}, None).weights(torch.from_numpy(q), torch.from_numpy(y))
    with_old, without = (of_ours(balanced(heads, {0}, o), q, y)[1] for o in (old, None))
    np.testing.assert_allclose(
        (with_old - without)[:, 0], w.numpy() * (lga_oracle.sigma(q[:, 0]) - lga_oracle.sigma(1.0)) / 4
    )


@pytest.mark.parametrize("lam", [0.5, 1.0, 2.0])
def test_without_learnt_classes_it_is_glfcs_loss_times_two_lam(lam):
    """And GLFC's own bits where there is no old model: lam weighs nothing then."""
    heads = HEADS[1]
    q, y, old = drawn(heads, 1)
    told = torch.from_numpy(old)
    ours, theirs = (
        of_ours(made, q, y)
        for made in (balanced(heads, (), told, lam=lam), Compensated(heads, False, known(heads, ()), lambda _: told))
    )
    assert ours[0] == 2 * lam * theirs[0]
    np.testing.assert_allclose(ours[1], 2 * lam * theirs[1], rtol=1e-15)
    first = Heads(((0, 1, 2, 3),), (0, 1, 2, 3))
    ours, theirs = (
        of_ours(made, q, y)
        for made in (balanced(first, (), None, lam=lam), Compensated(first, False, known(first, ()), None))
    )
    assert ours[0] == theirs[0]
    assert (ours[1] == theirs[1]).all()


def test_groups_tell_themselves_apart_from_the_third_task_on():
    for task, differs in ((1, False), (2, True)):
        heads = HEADS[task]
        q, y, old = drawn(heads, 2)
        learnt = set(range(old.shape[1]))
        found = [of_ours(balanced(heads, learnt, torch.from_numpy(old), groups), q, y)[0] for groups in GROUPS]
        assert (found[0] != found[1]) is differs


# Whole runs -----------------------------------------------------------------------------------------------------------


def lga(**knobs) -> LGA:
    return LGA(**{"training": training(), "memory": 8, "proxy": "none", **knobs})


@pytest.mark.parametrize("recurring", [False, True])
@pytest.mark.parametrize("memory", [0, 9])
@pytest.mark.parametrize("groups", GROUPS)
def test_training_on_features_is_what_the_equations_say(groups, memory, recurring):
    """The whole stream: weights, exemplars, old model, average; a client misses a task, one joins late."""
    method = lga(
        training=on_features(batch_size=200, epochs=3, lr=0.5), trains="features", memory=memory, groups=groups
    )
    oracle = lga_oracle.Plain(memory, lr=0.5, groups=groups)
    if not memory:
        oracle.keep = lambda *_: None
    assert_as_written_down(method, oracle, recurring)


def model_after(method, tasks: int):
    return model_of(learnt(method, "images", SIZES[:tasks]))


@pytest.mark.slow
def test_the_first_task_is_glfcs_bit_for_bit_and_the_second_is_not():
    """lam and the groups say nothing where there is no old model."""
    theirs = GLFC(training=training(), memory=8, proxy="none")
    assert same(model_after(lga(lam=3.0, groups="cumulative"), 1), model_after(theirs, 1))
    assert not same(model_after(lga(lam=0.5), 2), model_after(theirs, 2))


@pytest.mark.slow
def test_groups_matter_from_the_third_task_on():
    first, second = (lga(groups=groups) for groups in GROUPS)
    assert same(model_after(first, 2), model_after(second, 2))
    assert not same(model_after(first, 3), model_after(second, 3))


# Knobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{"groups": "paper"}, {"lam": 0}, {"proxy_init": -1}, {"radius": -0.1}], ids=str)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(LGA, knobs, "method")
