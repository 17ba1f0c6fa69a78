"""FedEWC against the equations in NumPy: penalty, limits, the published variant."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.fedewc import FISHER, Anchored, FedEWC
from fcl_bench.training.network import Heads, Network
from fcl_bench.typed import typed_instance
from tests.methods.classical_harness import (
    INPUTS,
    SIZES,
    STREAMS,
    assert_as_written_down,
    exchanged,
    feature_tasks,
    federation,
    pictures,
    training,
)
from tests.methods.classical_oracle import Classical
from tests.methods.training_harness import federation_of, learn_images, tiny_context
from tests.methods.whole_runs import feature_context, model_of, same

WHOLE = {"batch_size": 64, "epochs": 3, "lr": 0.1}


@pytest.mark.parametrize("recurring", [False, True])
@pytest.mark.parametrize(
    "knobs",
    [
        {"strength": 5.0, "normalise": "none", "loss_classes": "seen"},
        {"strength": 20.0, "normalise": "none", "fisher_max": 0.1, "gamma": 0.5, "loss_classes": "seen"},
        {"strength": 5.0, "normalise": "none", "gamma": 0.0},
        {"strength": 2.0, "gamma": 0.5},
        {"strength": 4.0, "fisher_max": 0.05, "loss_classes": "seen"},
    ],
    ids=str,
)
def test_training_on_features_is_what_the_equations_say(knobs, recurring):
    method = FedEWC(training(**WHOLE), trains="features", **knobs)
    oracle = Classical(
        momentum=0.5,
        decay=1e-3,
        over=method.loss_classes,
        ewc=method.strength,
        gamma=method.gamma,
        most=np.inf if method.fisher_max is None else method.fisher_max,
        normalise=method.normalise == "maximum",
    )
    assert_as_written_down(method, oracle, recurring)


# The penalty ----------------------------------------------------------------------------------------------------------


def two_heads() -> Network:
    network = Network(tiny_context().network)
    network.grow([3, 2], seed=0)
    return network


def anchored(network: Network, strength: float, moved: float):
    """The penalty on all but the new head; the weights have moved by up to `moved` from theta*."""
    rng = torch.Generator().manual_seed(5)
    own = {name: value for name, value in network.named_parameters() if not name.startswith("heads.1")}
    pairs = [
        (value, torch.rand(value.shape, generator=rng), value.detach() + moved * torch.rand(value.shape, generator=rng))
        for value in own.values()
    ]
    for value in network.parameters():
        value.grad = torch.zeros_like(value)
    return own, pairs, Anchored(Heads(((0, 1, 2), (3, 4)), (3, 4)), FedEWC(strength=strength), pairs)


def test_its_gradient_is_a_finite_difference_of_the_penalty():
    network = two_heads()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    own, pairs, objective = anchored(network, strength=7.0, moved=0.5)
    objective.modify_gradients(network)
    assert same(network.state_dict(), before)  # running statistics and weights alike

    def penalty(name, place, step):
        total = 0.0
        for (other, value), (_, F, anchor) in zip(own.items(), pairs, strict=True):
            theta = value.detach().double().flatten().clone()
            if other == name:
                theta[place] += step
            total += 3.5 * float((F.double().flatten() * (theta - anchor.double().flatten()) ** 2).sum())
        return total

    for name, value in own.items():
        for place in (0, value.numel() - 1):
            slope = (penalty(name, place, 1e-4) - penalty(name, place, -1e-4)) / 2e-4
            assert float(value.grad.flatten()[place]) == pytest.approx(slope, rel=1e-4, abs=1e-5), name
    assert not network.heads[1].weight.grad.any()
    assert not network.heads[1].bias.grad.any()


def test_where_nothing_has_moved_the_gradient_is_as_it_was():
    network = two_heads()
    own, _, objective = anchored(network, strength=1e6, moved=0.0)
    for value in own.values():
        value.grad.normal_(generator=torch.Generator().manual_seed(1))
    before = {name: value.grad.clone() for name, value in own.items()}
    objective.modify_gradients(network)
    assert all(torch.equal(value.grad, before[name]) for name, value in own.items())


@pytest.mark.slow
def test_a_first_step_does_not_depend_on_the_strength():
    """At theta* the penalty is flat, on any wire: the client's theta* is the very model that it starts from."""
    tasks = [[clients[0]] for clients in pictures()[:2]]
    for wire in ("float32", "float16", "float64"):
        context, found = tiny_context(wire=wire), []
        for strength in (1.0, 1e9):
            server = learn_images(
                FedEWC(training(rounds=1, batch_size=64), strength=strength, fisher_max=None), context, tasks
            )
            found.append(server.network.state())
        assert same(*found)


@pytest.mark.slow
def test_the_stronger_the_penalty_the_less_moves_what_matters():
    """||theta - theta*||_F over the second task decreases, to nearly nothing; the new head trains all the same."""
    tasks, found, new = feature_tasks()[:2], [], []
    for strength in (0.01, 10.0, 100.0, 300.0):
        knobs = training(rounds=20, lr=0.01, momentum=0.0, weight_decay=0.0)
        method = FedEWC(knobs, trains="features", strength=strength, normalise="none", loss_classes="seen")
        told = []
        server = learn_images(
            method,
            feature_context(INPUTS),
            tasks,
            after=lambda _, server, told=told: told.append((dict(server.fisher), dict(server.anchor))),
        )
        (F, before), (_, after) = told
        found.append(sum(float((F[name] * (after[name] - before[name]) ** 2).sum()) for name in F) ** 0.5)
        new.append(server.network.heads[1].bias.detach().norm())
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.1 * found[0]
    assert min(new) > 0.5 * max(new) > 0


def test_a_weight_without_information_is_free():
    """A feature that is 0 in all of the first task says nothing about its weights."""
    tasks = feature_tasks()[:2]
    for Z, _ in tasks[0]:
        Z[:, 0] = 0
    method = FedEWC(training(rounds=1, batch_size=64), trains="features", strength=1e4, loss_classes="task")
    server = learn_images(method, feature_context(INPUTS), tasks[:1])
    assert not server.fisher["heads.0.weight"][:, 0].any()
    assert (server.fisher["heads.0.weight"][:, 1:] > 0).all()


def test_normalised_information_does_not_depend_on_the_scale_of_its_gradients():
    """Each task's largest entry is 1 before gamma and the bound, so the same strength means the same on any network."""
    server = FedEWC(training(), trains="features").server(feature_context(INPUTS))
    server.stage = FISHER
    F = {}
    for scale in (1.0, 1e-6):
        server.fisher, server._samples = {}, 7
        server._squares = {name: scale * torch.tensor([1.0, 4.0, 2.0]) for name in ("a", "b")}
        server.network.state = lambda: {name: torch.zeros(3) for name in ("a", "b")}
        server.tasks = [range(3)]
        server.finish_stage()
        F[scale] = server.fisher["a"]
        torch.testing.assert_close(F[scale], torch.tensor([0.25, 1.0, 0.5]))


# Limits, and what is sent ---------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("images")
@pytest.mark.parametrize("trains", ["images", "features"])
def test_without_strength_it_is_fedavg_bit_for_bit_and_byte_for_byte(trains):
    """No stage of its own either."""
    knobs = training(fraction=0.5, rounds=3)
    ours, theirs = federation(FedEWC(knobs, trains=trains, strength=0.0)), federation(FedAvg(knobs, trains=trains))
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)
    assert same(ours.server.state_dict(), theirs.server.state_dict())
    assert ours.server.report() == {}
    assert not same(model_of(federation(FedEWC(knobs, trains=trains))), model_of(theirs))


@pytest.mark.parametrize("trains", ["images", "features"])
def test_the_first_task_is_fedavg_bit_for_bit(trains):
    first = STREAMS[trains][1]()[:1]
    ours, theirs = (
        federation(m, first) for m in (FedEWC(training(), trains=trains), FedAvg(training(), trains=trains))
    )
    assert same(model_of(ours), model_of(theirs))
    assert ours.server.fisher


@pytest.mark.slow
def test_bytes():
    """Up, once per task, S (|theta| floats) and a number; down, F once, and theta* where the last stage was missed."""
    ours, theirs = federation(FedEWC(training())), federation(FedAvg(training()))
    sizes = {name: value.numel() for name, value in ours.server.network.named_parameters()}
    floats = [4 * sum(n for name, n in sizes.items() if not name.startswith(tuple(later))) for later in
              (("heads.1", "heads.2"), ("heads.2",), ("none",))]  # fmt: skip
    rows = {(row.task, row.round, row.client): row for row in exchanged(theirs)}
    for row in exchanged(ours):
        here = SIZES[row.task][row.client] > 0
        if row.stage == FISHER:
            assert row.round == 2
            assert row.up_bytes == (floats[row.task] + 8 if here else 0)
            continue
        plain = rows[row.task, row.round, row.client]
        assert row.up_bytes == plain.up_bytes
        extra = 0
        if here and row.task and row.round == 0:
            before = SIZES[row.task - 1][row.client] > 0
            extra = floats[row.task - 1] * (1 if before else 2)
        assert row.down_bytes - plain.down_bytes == extra, row
    assert not any("running" in name for name in ours.server.fisher)


def test_a_task_without_a_label_leaves_what_is_known():
    """The server keeps F, and the third task is held to the model as it is."""
    tasks, method = pictures(), FedEWC(training())
    found = federation_of(method, tiny_context(), tasks, unlabelled=[(1, 0), (1, 2)])
    told = []
    found.run(lambda done: told.append((dict(done.server.fisher), dict(done.server.anchor))))
    assert same(told[0][0], told[1][0])
    assert same(told[0][1], told[1][1])
    assert not same(told[2][0], told[1][0])


def test_steps_that_overshoot_are_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        federation(FedEWC(training(), trains="features"))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        federation(FedEWC(training(lr=1e-3), trains="features", strength=1e3))
    assert caplog.text.count("lr times strength times F is up to 1 ") == 0
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        federation(
            FedEWC(training(momentum=0.5, lr=1e-3), trains="features", strength=1e4),
            feature_tasks()[:2],
        )
    assert caplog.text.count("lr times strength times F is up to 10 after task 0; above 3") == 1


# The published variant, and why it is fedavg ------------------------------------------------------------------------


def test_published_is_fedavg_over_the_tasks_own_scores_with_uniform_weights(caplog):
    """The same bits and bytes, no stage, nothing kept; and it says so."""
    knobs = training(weighting="uniform", fraction=0.5, rounds=3)
    published = FedEWC(knobs, variant="published", loss_classes="task")
    ours, theirs = federation(published), federation(FedAvg(knobs, loss_classes="task"))
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)
    assert same(ours.server.state_dict(), theirs.server.state_dict())
    with caplog.at_level(logging.WARNING):
        published.check(tiny_context(), [3, 2, 2])
        FedEWC(knobs).check(tiny_context(), [3, 2, 2])
    [told] = caplog.messages
    assert told.startswith("method.variant=published is fedavg")


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"loss_classes": "seen"}, "method.loss_classes=seen contradicts method.variant=published"),
        ({"training": {"weighting": "samples"}}, "method.training.weighting=samples contradicts"),
        ({"strength": 5}, "method.strength=5 contradicts .* [(]method.strength=10"),
        ({"strength": 0}, "method.strength=0 contradicts"),
        ({"fisher_max": 1e-4}, "method.fisher_max=0.0001 contradicts"),
        ({"normalise": "none"}, "method.normalise=none contradicts"),
        ({"gamma": 0.9}, "method.gamma=0.9 contradicts"),
    ],
)
def test_knobs_that_contradict_the_published_variant_are_refused(knobs, told):
    fitting = {"variant": "published", "loss_classes": "task", "training": {"weighting": "uniform"}}
    assert typed_instance(FedEWC, fitting, "method").variant == "published"
    with pytest.raises(UserError, match=told):
        typed_instance(FedEWC, {**fitting, **knobs}, "method")


def test_in_the_public_code_the_penalty_reaches_no_weight_that_trains():
    """A stand-in for its local round: the optimiser has a deep copy, the penalty is a sum over the original.

    The original's gradient is lambda F (theta - theta*), the copy's is that of the cross-entropy alone, bit for bit.
    """
    torch.manual_seed(0)
    network = torch.nn.Linear(6, 3)
    fisher, mean = torch.ones(3, 6), torch.zeros(3, 6)
    X, y = torch.randn(8, 6), torch.arange(8) % 3

    def gradients(strength: float):
        original = copy.deepcopy(network)
        model = copy.deepcopy(original)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        penalty = (fisher * (original.weight - mean).pow(2)).sum() / 2
        loss = torch.nn.functional.cross_entropy(model(X), y) + strength * penalty
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return original.weight.grad, model.weight

    (without, plain), (reached, trained) = gradients(0.0), gradients(1000.0)
    assert torch.equal(trained, plain)
    torch.testing.assert_close(reached, 1000.0 * network.weight.detach())
    assert not without.any()
    alone = copy.deepcopy(network)
    (1000.0 * network.weight.pow(2).sum() / 2).backward()
    assert alone.weight.grad is None


@pytest.mark.parametrize(
    "knobs",
    [{"strength": -1}, {"gamma": 1.5}, {"fisher_max": 0}, {"normalise": "x"}, {"variant": "x"}],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(FedEWC, knobs, "method")
