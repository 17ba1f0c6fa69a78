"""FedEWC against the equations in NumPy: penalty, Fisher information over clients, limits, the published variant."""

from __future__ import annotations

import copy
import dataclasses
import logging

import numpy as np
import pytest
import torch

from fcl_bench.config import typed_instance
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.fedewc import FISHER, Anchored, FedEWC
from fcl_bench.methods.gradient.finetune import FineTune
from fcl_bench.protocol.message import Message
from fcl_bench.training.heads import Heads
from fcl_bench.training.network import Network
from tests.methods.classical_harness import (
    SIZES,
    STREAMS,
    assert_as_written_down,
    assert_resumes,
    exchanged,
    feature_problem,
    feature_tasks,
    federation,
    model_of,
    pictures,
    same,
    training,
)
from tests.methods.classical_oracle import Classical, fisher_sum
from tests.methods.harness import take_in, turn
from tests.methods.training_harness import (
    federation_of,
    image_shard,
    images_stream,
    learn_images,
    tiny_problem,
)

WHOLE = {"batch_size": 64, "epochs": 3, "lr": 0.1}


@pytest.mark.parametrize("recurring", [False, True])
@pytest.mark.parametrize(
    "knobs",
    [
        {"strength": 5.0, "fisher_max": None},
        {"strength": 20.0, "fisher_max": 0.1, "gamma": 0.5},
        {"strength": 5.0, "fisher_max": None, "fisher": "exact", "loss_over": "task", "gamma": 0.0},
    ],
    ids=str,
)
def test_training_on_features_is_what_the_equations_say(knobs, recurring):
    method = FedEWC(training(**WHOLE), on="features", **knobs)
    oracle = Classical(
        momentum=0.5,
        decay=1e-3,
        over=method.loss_over,
        ewc=method.strength,
        gamma=method.gamma,
        kind=method.fisher,
        most=np.inf if method.fisher_max is None else method.fisher_max,
    )
    assert_as_written_down(method, oracle, recurring)


# The penalty ----------------------------------------------------------------------------------------------------------


def two_heads() -> Network:
    network = Network(tiny_problem().network)
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
    return own, pairs, Anchored(Heads(((0, 1, 2), (3, 4)), (3, 4)), "seen", False, pairs, strength)


def test_its_gradient_is_a_finite_difference_of_the_penalty():
    network = two_heads()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    own, pairs, objective = anchored(network, strength=7.0, moved=0.5)
    objective.direction(network)
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
    objective.direction(network)
    assert all(torch.equal(value.grad, before[name]) for name, value in own.items())


def test_a_first_step_does_not_depend_on_the_strength():
    """At theta* the penalty is flat, on any wire: the client's theta* is the very model that it starts from."""
    tasks = [[clients[0]] for clients in pictures()[:2]]
    for wire in ("float32", "float16", "float64"):
        problem, found = tiny_problem(wire=wire), []
        for strength in (1.0, 1e9):
            server = learn_images(
                FedEWC(training(rounds=1, batch_size=64), strength=strength, fisher_max=None), problem, tasks
            )
            found.append(server.network.state())
        assert same(*found)


def test_the_stronger_the_penalty_the_less_moves_what_matters():
    """||theta - theta*||_F over the second task decreases, to nearly nothing; the new head trains all the same."""
    tasks, found, new = feature_tasks()[:2], [], []
    for strength in (0.01, 10.0, 100.0, 300.0):
        knobs = training(rounds=20, lr=0.01, momentum=0.0, weight_decay=0.0)
        method = FedEWC(knobs, on="features", strength=strength, fisher_max=None)
        told = []
        server = learn_images(
            method,
            feature_problem(),
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
    method = FedEWC(training(rounds=1, batch_size=64), on="features", strength=1e4, loss_over="task")
    server = learn_images(method, feature_problem(), tasks[:1])
    assert not server.fisher["heads.0.weight"][:, 0].any()
    assert (server.fisher["heads.0.weight"][:, 1:] > 0).all()


# The Fisher information over clients ----------------------------------------------------------------------------------


def answers(method: FedEWC, parts: list, order: list[int] | None = None, problem=None):
    """The server after the stage, where the model is always that of the whole stream's first task."""
    problem = problem or tiny_problem()
    server, client = method.server(problem), method.client(problem)
    task = images_stream([parts])[0]
    server.start_task(task)
    number = method.stages(task).index(FISHER)
    broadcast, sent = server.broadcast(task, number), {}
    for k in order or range(len(parts)):
        if len(parts[k][1]):
            sent[k] = turn(client, image_shard(k, 0, *parts[k]), broadcast)
            take_in(server, k, sent[k], task, number)
    server.finish_round()
    return server, sent


@pytest.mark.parametrize("kind", ["empirical", "exact"])
def test_it_is_that_of_the_pooled_samples_however_they_are_dealt(kind):
    (images, labels), _, _ = pictures()[0]
    more, theirs = pictures()[0][1]
    images, labels = torch.cat([images, more]), torch.cat([labels, theirs])
    method = FedEWC(training(), fisher=kind, fisher_max=None)
    pooled, _ = answers(method, [(images, labels)])
    assert pooled.fisher.keys() == {name for name, _ in pooled.network.named_parameters()}
    chance = np.random.default_rng(0).permutation(len(labels))
    for cut, order in (([1, 2], [2, 0, 1]), ([7, 7], [0, 2]), ([20, 22], None)):
        parts = [(images[chosen], labels[chosen]) for chosen in np.split(chance, cut)]
        server, sent = answers(method, parts, order)
        assert [sent[k].samples for k in sorted(sent)] == [len(y) for _, y in parts if len(y)]
        for name, F in pooled.fisher.items():
            torch.testing.assert_close(server.fisher[name], F, rtol=1e-4, atol=1e-9)


def test_it_adds_up_over_tasks_with_gamma_and_is_clipped():
    """F <- min(gamma F + F_t, fisher_max), by uploads that are made up."""
    method = FedEWC(training(), on="features", gamma=0.5, fisher_max=3.0)
    server, told = method.server(feature_problem(2)), []
    for task in images_stream(feature_tasks(inputs=2)):
        server.start_task(task)
        server.broadcast(task, 2)
        for number, samples in ((4.0, 1), (20.0, 7)):
            made = {
                name: torch.full(e.shape, number, dtype=torch.float64) for name, e in server.expects(task, 2).items()
            }
            server.absorb(0, Message(made, samples=samples))
        server.finish_round()
        told.append({name: float(F.mean()) for name, F in server.fisher.items()})
    assert told[0] == {"heads.0.weight": 3.0, "heads.0.bias": 3.0}
    assert told[1] == {**told[0], "heads.1.weight": 3.0, "heads.1.bias": 3.0}
    free = dataclasses.replace(method, fisher_max=None)
    server, told = free.server(feature_problem(2)), []
    for task in images_stream(feature_tasks(inputs=2)):
        server.start_task(task)
        server.broadcast(task, 2)
        made = {name: torch.full(e.shape, 6.0) for name, e in server.expects(task, 2).items()}
        server.absorb(0, Message(made, samples=2))
        server.finish_round()
        told.append({name: float(F.mean()) for name, F in server.fisher.items() if name.endswith("bias")})
    assert told == [
        {"heads.0.bias": 3.0},
        {"heads.0.bias": 4.5, "heads.1.bias": 3.0},
        {"heads.0.bias": 5.25, "heads.1.bias": 4.5, "heads.2.bias": 3.0},
    ]
    assert server.report()["fisher"]["largest"] == 5.25
    assert server.report()["fisher"]["at_maximum"] == 0


@pytest.mark.parametrize("recurring", [False, True])
def test_it_is_of_the_model_after_the_task_over_the_classes_that_compete(recurring):
    tasks, told = feature_tasks(recurring), []
    method = FedEWC(training(), on="features", loss_over="task", fisher_max=None, gamma=0.0, strength=1e-9)
    server = learn_images(method, feature_problem(), tasks, after=lambda _, server: told.append(dict(server.fisher)))
    state = server.network.state()
    parts = [torch.cat([state[f"heads.{h}.weight"], state[f"heads.{h}.bias"][:, None]], 1) for h in range(3)]
    X = np.vstack([np.hstack([Z.numpy(), np.ones((len(Z), 1))]) for Z, _ in tasks[-1]])
    labels = np.concatenate([y.numpy() for _, y in tasks[-1]])
    expected = fisher_sum(X, labels, torch.cat(parts).double().numpy(), np.unique(labels), "empirical") / len(labels)
    found = torch.cat(
        [torch.cat([told[-1][f"heads.{h}.weight"], told[-1][f"heads.{h}.bias"][:, None]], 1) for h in range(3)]
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-7)
    # A class that came back is looked at again.
    assert bool(found[: -len(server.columns[-1])].any()) == recurring


def test_a_client_measures_at_most_so_many_samples_of_its_own():
    parts = pictures()[0]
    method = FedEWC(training(), fisher_samples=5)
    _, sent = answers(method, parts)
    assert [message.samples for message in sent.values()] == [5, 5]
    _, again = answers(method, parts)
    assert all(same(dict(sent[k]), dict(again[k])) for k in sent)
    _, whole = answers(dataclasses.replace(method, fisher_samples=14), parts)
    assert [message.samples for message in whole.values()] == [14, 9]
    assert all((whole[0][name] >= sent[0][name] - 1e-12).all() for name in sent[0])
    assert not same(dict(whole[0]), dict(sent[0]))


@pytest.mark.parametrize("wire", ["float16", "bfloat16", "float32"])
def test_it_survives_any_wire(wire):
    found = federation(FedEWC(training()), problem=tiny_problem(wire=wire))
    assert all(torch.isfinite(F).all() and (F >= 0).all() for F in found.server.fisher.values())


# Limits, and what is sent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["images", "features"])
def test_without_strength_it_is_finetune_bit_for_bit_and_byte_for_byte(on):
    """No stage of its own either."""
    knobs = training(fraction=0.5, rounds=3)
    ours, theirs = federation(FedEWC(knobs, on=on, strength=0.0)), federation(FineTune(knobs, on=on))
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)
    assert same(ours.server.state_dict(), theirs.server.state_dict())
    assert ours.server.report() == {}
    assert not same(model_of(federation(FedEWC(knobs, on=on))), model_of(theirs))


@pytest.mark.parametrize("on", ["images", "features"])
def test_the_first_task_is_finetune_bit_for_bit(on):
    first = STREAMS[on][1]()[:1]
    ours, theirs = (federation(m, first) for m in (FedEWC(training(), on=on), FineTune(training(), on=on)))
    assert same(model_of(ours), model_of(theirs))
    assert ours.server.fisher


def test_bytes():
    """Up, once per task, S (|theta| floats) and a number; down, F once, and theta* where the last stage was missed."""
    ours, theirs = federation(FedEWC(training())), federation(FineTune(training()))
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


def test_what_never_trains_again_is_not_measured_and_frozen_rows_rest():
    tasks = feature_tasks(recurring=True)
    method = FedEWC(training(), frozen_stages=2, frozen_heads=True, strength=10.0)
    server, _ = answers(method, pictures()[0])
    assert {name.split(".")[1] for name in server.fisher} == {"stage3", "stage4", "0"}
    heads = []
    frozen = FedEWC(training(), on="features", frozen_heads=True, strength=10.0, fisher_max=None)
    learn_images(
        frozen, feature_problem(), tasks, after=lambda _, s: heads.append(s.network.heads[0].weight.detach().clone())
    )
    assert torch.equal(heads[1][:2], heads[0][:2])
    assert not torch.equal(heads[1][2], heads[0][2])
    assert torch.equal(heads[2], heads[1])


def test_a_task_without_a_label_leaves_what_is_known():
    """The server keeps F, and the third task is held to the model as it is."""
    tasks, method = pictures(), FedEWC(training())
    found = federation_of(method, tiny_problem(), tasks, unlabelled=[(1, 0), (1, 2)])
    told = []
    found.run(lambda done: told.append((dict(done.server.fisher), dict(done.server.anchor))))
    assert same(told[0][0], told[1][0])
    assert same(told[0][1], told[1][1])
    assert not same(told[2][0], told[1][0])


@pytest.mark.parametrize("on", ["images", "features"])
def test_a_resumed_run_is_an_uninterrupted_one(on):
    assert_resumes(FedEWC(training(fraction=0.7), on=on, fisher="sampled", fisher_samples=6))


def test_steps_that_overshoot_are_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        federation(FedEWC(training(), on="features"))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        federation(FedEWC(training(lr=1e-3), on="features", strength=1e7))
    assert caplog.text.count("lr times strength times F is up to 1 ") == 0
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        federation(
            FedEWC(training(momentum=0.5, lr=1e-3), on="features", strength=1e8, loss_over="task"), feature_tasks()[:2]
        )
    assert caplog.text.count("lr times strength times F is up to 10 after task 0; above 3") == 1


# The published variant, and why it is finetune ------------------------------------------------------------------------


def test_published_is_finetune_over_the_tasks_own_scores_with_uniform_weights(caplog):
    """The same bits and bytes, no stage, nothing kept; and it says so."""
    knobs = training(weighting="uniform", fraction=0.5, rounds=3)
    published = FedEWC(knobs, variant="published", loss_over="task")
    ours, theirs = federation(published), federation(FineTune(knobs, loss_over="task"))
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)
    assert same(ours.server.state_dict(), theirs.server.state_dict())
    with caplog.at_level(logging.WARNING):
        published.check(tiny_problem(), [3, 2, 2])
        FedEWC(knobs).check(tiny_problem(), [3, 2, 2])
    [told] = caplog.messages
    assert told.startswith("method.variant=published is finetune")


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"loss_over": "seen"}, "method.loss_over=seen contradicts method.variant=published"),
        ({"training": {"weighting": "samples"}}, "method.training.weighting=samples contradicts"),
        ({"strength": 5}, "method.strength=5 contradicts .* [(]method.strength=1000, or method.variant=working"),
        ({"strength": 0}, "method.strength=0 contradicts"),
        ({"fisher_max": None}, "method.fisher_max=null contradicts"),
        ({"fisher": "exact"}, "method.fisher=exact contradicts"),
        ({"fisher_samples": 9}, "method.fisher_samples=9 contradicts .* [(]method.fisher_samples=null"),
        ({"gamma": 0.9}, "method.gamma=0.9 contradicts"),
    ],
)
def test_knobs_that_contradict_the_published_variant_are_refused(knobs, told):
    fitting = {"variant": "published", "loss_over": "task", "training": {"weighting": "uniform"}}
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
    [{"strength": -1}, {"gamma": 1.5}, {"fisher": "true"}, {"fisher_samples": 0}, {"fisher_max": 0}, {"variant": "x"}],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(FedEWC, knobs, "method")
