"""FedNTD: the distillation's value and gradient, what it distils, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.distillation.fedntd import FedNTD, NotTrueDistillation, not_true_distillation
from fcl_bench.training.network import Heads
from fcl_bench.typed import typed_instance
from tests.methods.plain_training import made_tasks
from tests.methods.softmax_oracle import TASKS, Oracle, class_weights, setting, small_batches, softmax, whole_batches
from tests.methods.training_harness import federation_of, tiny_context
from tests.methods.whole_runs import feature_context, learnt, model_of, same


def term(beta: float, tau: float):
    """Its gradient by the logits: beta tau (softmax(q_-y / tau) - softmax(q^g_-y / tau)), 0 for the true class."""

    def gradient(S, S0, Sj, y):
        found = np.zeros_like(S)
        for i, true in enumerate(y):
            others = np.arange(S.shape[1]) != true
            own, wanted = softmax(S[None, i, others] / tau), softmax(S0[None, i, others] / tau)
            found[i, others] = beta * tau * (own - wanted)[0]
        return found

    return gradient


def distillation(q, known, y, tau: float = 1.0) -> float:
    found = not_true_distillation(torch.tensor(q).double(), torch.tensor(known).double(), torch.tensor(y), tau)
    return float(found)


# The term ------------------------------------------------------------------------------------------------------------


def test_the_value_by_hand():
    """q = (2, 1, 0), q^g = (0, 1, 3), y = 0: KL of softmax(1, 3) to softmax(1, 0)."""
    assert distillation([[2, 1, 0]], [[0, 1, 3]], [0]) == pytest.approx(0.828725, abs=5e-7)
    p, q = 1 / (1 + np.exp(2)), 1 / (1 + np.exp(-1))
    by_hand = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    assert distillation([[2, 1, 0]], [[0, 1, 3]], [0]) == pytest.approx(by_hand, rel=1e-12)
    # A temperature of 2 is the value of halved logits, four times.
    halved = distillation([[1, 0.5, 0]], [[0, 0.5, 1.5]], [0])
    assert distillation([[2, 1, 0]], [[0, 1, 3]], [0], tau=2) == pytest.approx(4 * halved, rel=1e-12)


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_its_gradient_is_the_difference_of_the_two_softmaxes(tau):
    rng = np.random.default_rng(0)
    S, S0, y = rng.standard_normal((7, 5)), rng.standard_normal((7, 5)), rng.integers(0, 5, 7)
    scores = torch.tensor(S, requires_grad=True)
    not_true_distillation(scores, torch.tensor(S0), torch.tensor(y), tau).backward()
    np.testing.assert_allclose(scores.grad.numpy() * 7, term(1.0, tau)(S, S0, None, y), atol=1e-12)
    assert not scores.grad[torch.arange(7), torch.tensor(y)].any()


def test_neither_the_true_classes_logit_nor_a_shift_of_all_nor_the_order_of_the_classes_matters():
    rng = np.random.default_rng(1)
    S, S0, y = rng.standard_normal((6, 4)), rng.standard_normal((6, 4)), rng.integers(0, 4, 6)
    value = distillation(S, S0, y)
    other = S.copy()
    other[np.arange(6), y] += 7
    order = np.array([2, 0, 3, 1])
    assert value > 0.01
    assert distillation(other, S0, y) == pytest.approx(value, rel=1e-12)
    assert distillation(S + 3, S0 - 2, y) == pytest.approx(value, rel=1e-12)
    assert distillation(S[:, order], S0[:, order], np.argsort(order)[y]) == pytest.approx(value, rel=1e-12)
    assert distillation(S, S, y) == 0


@pytest.mark.parametrize("classes", [1, 2])
def test_without_two_other_classes_there_is_nothing_to_distil(classes):
    scores = torch.randn(5, classes, dtype=torch.float64, requires_grad=True)
    loss = not_true_distillation(scores, torch.randn(5, classes).double(), torch.zeros(5, dtype=torch.int64), 1.0)
    loss.backward()
    assert loss.item() == 0
    assert not scores.grad.any()


def test_in_half_precision_it_is_computed_in_float32():
    scores, known = torch.randn(4, 6).bfloat16(), torch.randn(4, 6).bfloat16()
    y = torch.tensor([0, 1, 2, 5])
    found = not_true_distillation(scores, known, y, 1.0)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(
        float(not_true_distillation(scores.double(), known.double(), y, 1.0)), rel=1e-5
    )


class Known(torch.nn.Module):
    def forward(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("heads", "over", "compete"),
    [
        (Heads(((0, 1, 2), (3, 4)), (3, 4)), "seen", [0, 1, 2, 3, 4]),
        (Heads(((0, 1, 2), (3, 4, 5)), (3, 4, 5)), "task", [3, 4, 5]),
        # Classes 1 and 2 come back, scored by the first head.
        (Heads(((0, 1, 2), (3,)), (1, 2, 3)), "task", [1, 2, 3]),
        # Each task has a head of its own: class 1 does not compete with itself under the first.
        (Heads(((0, 1), (1, 2, 3)), (1, 2, 3)), "seen", [0, 2, 3, 4]),
    ],
)
def test_the_logits_that_compete_in_the_loss_are_distilled(heads, over, compete):
    rng = np.random.default_rng(2)
    columns = [heads.logits[logit] for logit in compete]
    L, y = len(heads.logits), rng.choice([column for column in heads.task if column in columns], 9)
    S, S0 = rng.standard_normal((9, L)), rng.standard_normal((9, L))
    objective = NotTrueDistillation(heads, FedNTD(loss_classes=over, beta=0.7, tau=2.0), Known())
    scores = torch.tensor(S, requires_grad=True)
    objective.score_loss(scores, torch.tensor(y), torch.tensor(S0)).backward()
    places = np.array([columns.index(label) for label in y])
    expected = np.zeros_like(S)
    expected[:, compete] = softmax(S[:, compete]) - np.eye(len(compete))[places]
    expected[:, compete] += term(0.7, 2.0)(S[:, compete], S0[:, compete], None, places)
    np.testing.assert_allclose(scores.grad.numpy() * 9, expected, atol=1e-12)


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_classes", ["seen", "task"])
@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (0.5, 3.0)])
def test_training_on_features_is_the_oracles(loss_classes, beta, tau):
    context, knobs = feature_context(), whole_batches()
    federation = learnt(FedNTD(knobs, loss_classes=loss_classes, trains="features", beta=beta, tau=tau), context, TASKS)
    expected = Oracle(knobs, loss_classes, term(beta, tau)).run(context, TASKS)
    np.testing.assert_allclose(class_weights(federation), expected, atol=3e-6)
    without = Oracle(knobs, loss_classes).run(context, TASKS)
    assert np.abs(without - expected).max() > 1e-3


@pytest.mark.slow_cases("images")
@pytest.mark.parametrize("trains", ["images", "features"])
def test_without_weight_it_is_fedavg_bit_for_bit(trains):
    context, tasks = setting(trains)
    plain = learnt(FedAvg(small_batches(), trains=trains), context, tasks)
    assert same(model_of(learnt(FedNTD(small_batches(), trains=trains, beta=0.0), context, tasks)), model_of(plain))
    distilled = learnt(FedNTD(small_batches(), trains=trains), context, tasks)
    assert not same(model_of(distilled), model_of(plain))
    # Nothing more is sent, nothing is kept.
    by = [[(row.up_bytes, row.down_bytes) for row in run.state.ledger.uploads] for run in (distilled, plain)]
    assert by[0] == by[1]
    assert distilled.state.client_storage_bytes == {}


def test_two_classes_are_fedavg_bit_for_bit():
    """On images, where both are differentiated by autograd."""
    tasks = made_tasks([[9, 7]], classes=2)
    found, plain = (learnt(method(small_batches()), tiny_context(), tasks) for method in (FedNTD, FedAvg))
    assert same(model_of(found), model_of(plain))


def test_the_first_step_of_a_round_is_fedavgs():
    context, once = feature_context(), whole_batches(rounds=1, epochs=1)
    found, plain = (learnt(method(once, trains="features"), context, TASKS[:1]) for method in (FedNTD, FedAvg))
    # To rounding: a softmax in float32 does not sum to 1 to the last bit.
    np.testing.assert_allclose(class_weights(found), class_weights(plain), atol=1e-7)
    twice = whole_batches(rounds=1, epochs=2)
    found, plain = (learnt(method(twice, trains="features"), context, TASKS[:1]) for method in (FedNTD, FedAvg))
    assert np.abs(class_weights(found) - class_weights(plain)).max() > 1e-3


def test_the_larger_the_weight_the_less_changes_of_what_is_said_of_other_classes():
    """One round of one client; the KL that is left between the broadcast and the trained model."""
    [[(Z, y), *_], _] = TASKS

    def left(beta: float) -> float:
        method = FedNTD(whole_batches(rounds=1, epochs=60, lr=0.05), trains="features", beta=beta)
        federation = federation_of(method, feature_context(), [[(Z, y)]])
        federation.server.start_task(federation.stream.tasks[0])
        before = class_weights(federation)
        federation.run(lambda _: None)
        X = np.hstack([Z.numpy(), np.ones((len(Z), 1))])
        return distillation(X @ class_weights(federation).T, X @ before.T, y.numpy())

    found = [left(beta) for beta in (0.0, 1.0, 5.0)]
    assert found[0] > 2 * found[1] > 4 * found[2] > 0


@pytest.mark.parametrize(("name", "value"), [("beta", -1), ("tau", 0), ("tau", float("inf"))])
def test_impossible_knobs_are_refused_with_their_key(name, value):
    with pytest.raises(UserError, match=rf"^method\.{name}="):
        typed_instance(FedNTD, {name: value}, "method")
