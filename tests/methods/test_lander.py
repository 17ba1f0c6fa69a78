"""LANDER: the client's loss against NumPy, its limits, the model that a task ends with, resumed runs, knobs."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fcl_bench.backbones.trainable import seeded
from fcl_bench.config import typed_instance
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.finetune import FineTune
from fcl_bench.methods.gradient.lander import LANDER
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import derived_seed
from fcl_bench.training.anchors import MappedNetwork, random_anchors
from fcl_bench.training.bounded import Bounded, Replaying, factors
from fcl_bench.training.generators.anchored import Synthesis
from fcl_bench.training.heads import Heads
from tests.methods.classical_harness import SIZES, exchanged, federation, pictures, training
from tests.methods.classical_oracle import softmax
from tests.methods.harness import turn
from tests.methods.training_harness import (
    federation_of,
    image_shard,
    image_tasks,
    images_stream,
    learn_image_task,
    learn_images,
    tiny_problem,
)
from tests.methods.whole_runs import assert_resumes, model_of, same

SYNTHESIS = {"images": 20, "batch": 12, "warmup": 1, "batches": 2, "noise": 5, "g_steps": 2, "kd_steps": 2}


def lander(knobs=None, synthesis=None, **own) -> LANDER:
    return LANDER(
        training(**(knobs or {})),
        **{"anchor_size": 6, **own},
        synthesis=Synthesis(**{**SYNTHESIS, **(synthesis or {})}),
    )


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seen", "known", "cur", "pre"), [(20, 10, 0.364603, 0.978475), (100, 90, 0.247984, 2.152534)])
def test_the_factors_of_old_and_new(seen, known, cur, pre):
    method = LANDER()
    of_current, of_previous = factors(seen, known)
    assert method.cur * of_current == pytest.approx(cur, abs=5e-7)
    assert method.pre * of_previous == pytest.approx(pre, abs=5e-7)


def mapped_network(heads: list[int], seed: int) -> MappedNetwork:
    network = MappedNetwork(tiny_problem().network, 6, seed=seed)
    network.grow(heads, seed=seed)
    with seeded(seed), torch.no_grad():
        for value in network.parameters():
            value.add_(0.05 * torch.randn(value.shape))
    return network.double().eval()


class Given:
    """A pool of given images."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def next(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[:count], torch.zeros(count)


def linear(layer: torch.nn.Linear, features: np.ndarray) -> np.ndarray:
    return features @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def scores(network: MappedNetwork, phi: np.ndarray) -> np.ndarray:
    return np.concatenate([linear(head, phi) for head in network.heads], axis=1)


def equations(network, teacher, phi, psi, known, labels, anchors, cur, pre, ltc, r) -> float:
    """The client's loss in NumPy on features: phi of its samples, psi of the synthetic ones, known under the teacher.

    Classes 0 to 2 are old, 3 and 4 those of the task.
    """
    b, q = len(labels), scores(network, phi)
    own = q[:, 3:] - np.log(np.exp(q[:, 3:]).sum(axis=1, keepdims=True))
    task = -own[np.arange(b), labels - 3].mean()
    task += ltc * max(((linear(network.mapping, phi) - anchors[labels]) ** 2).mean() - r, 0)
    said, wanted = scores(network, psi)[:, :3] / 2, softmax(scores(teacher, known) / 2)
    kd = -(wanted * (said - np.log(np.exp(said).sum(axis=1, keepdims=True)))).sum(axis=1).mean()
    kept = ((linear(network.mapping, psi) - linear(teacher.mapping, known)) ** 2).mean()
    return cur * task + pre * (kd + kept)


@pytest.mark.parametrize(("ltc", "r"), [(5.0, 0.015), (0.7, 0.0), (5.0, 100.0)])
def test_the_loss_of_a_later_task_is_what_the_equations_say(ltc, r):
    """In evaluation mode, so that features are fixed numbers; gradients of head and mapping by differences."""
    network, teacher = mapped_network([3, 2], 1), mapped_network([3], 2).requires_grad_(False)
    rng = torch.Generator().manual_seed(3)
    images, synthetic = (torch.randn(n, 3, 8, 8, generator=rng).double() for n in (7, 9))
    labels = torch.tensor([3, 4, 4, 3, 3, 4, 3])
    anchors = random_anchors(range(5), 6, 4).double()
    heads = Heads(((0, 1, 2), (3, 4)), (3, 4))
    objective = Replaying(
        heads, "task", False, ltc, r, anchors, 0.3, teacher=teacher, pool=Given(synthetic), count=9, previous=1.7
    )
    loss = objective.loss(network, images, labels)
    loss.backward()
    with torch.no_grad():
        phi, psi, known = (
            n.body(x).numpy() for n, x in ((network, images), (network, synthetic), (teacher, synthetic))
        )

    def written_down() -> float:
        return equations(network, teacher, phi, psi, known, labels.numpy(), anchors.numpy(), 0.3, 1.7, ltc, r)

    assert float(loss.detach()) == pytest.approx(written_down(), rel=1e-12)
    for weight in (network.heads[0].weight, network.heads[1].bias, network.mapping.weight, network.mapping.bias):
        gradient = weight.grad.flatten()
        for place in (0, len(gradient) - 1):
            ends = []
            for sign in (1e-6, -1e-6):
                with torch.no_grad():
                    weight.view(-1)[place] += sign
                    ends.append(written_down())
                    weight.view(-1)[place] -= sign
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(gradient[place]), abs=1e-8)


def test_the_first_pass_is_what_adds_up():
    objective = Bounded(Heads(((0, 1),), (0, 1)), "task", False, 0.0, 0.0, None, 1.0)
    objective._losses = [torch.tensor(float(2**step)) for step in range(6)]
    assert objective.first_pass(2).tolist() == [1 + 2 + 4]
    objective._losses = []
    assert objective.first_pass(2).tolist() == [0]


# Limits ---------------------------------------------------------------------------------------------------------------


def test_inside_a_huge_ball_the_first_task_is_finetune_bit_for_bit_but_for_the_mapping():
    """Which has no gradient but weight decay's."""
    first = pictures()[:1]
    ours = model_of(federation(lander(final="last", radius=1e6), first))
    theirs = model_of(federation(FineTune(training(), loss_over="task"), first))
    assert same({name: value for name, value in ours.items() if not name.startswith("mapping")}, theirs)
    small = model_of(federation(lander(final="last"), first))
    assert not same({name: value for name, value in small.items() if not name.startswith("mapping")}, theirs)


def three_and_three():
    return image_tasks(np.random.default_rng(0), [3, 3], [[9, 7, 0], [8, 0, 7]])


@pytest.mark.parametrize("over", ["task", "seen"])
def test_without_both_terms_and_at_factor_1_it_is_finetune_bit_for_bit_and_byte_for_byte(over):
    """Of 6 classes 3 are old: (1 + 1/a) / b = 1.5 / sqrt(1/2)."""
    factor = factors(6, 3)[0]
    assert factor == pytest.approx(1.5 * math.sqrt(2))
    cur = 1 / factor
    assert cur * factor == 1
    ours = federation(lander(ltc=0.0, pre=0.0, cur=cur, final="last", loss_over=over), three_and_three())
    theirs = federation(FineTune(training(), loss_over=over), three_and_three())
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)
    assert ours.server.state_dict().keys() == theirs.server.state_dict().keys()
    other = federation(lander(ltc=0.0, pre=0.0, cur=0.9 * cur, final="last", loss_over=over), three_and_three())
    assert not same(model_of(other), model_of(theirs))


def test_cur_alone_scales_the_steps_of_finetune():
    """Without momentum and weight decay a loss times c is a step size times c."""
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    ours = learn_images(lander(plain, ltc=0.0, pre=0.0, cur=0.1, final="last"), tiny_problem(), three_and_three())
    theirs = FineTune(training(**plain), loss_over="task")
    server = theirs.server(tiny_problem())
    factor = 0.1 * factors(6, 3)[0]
    for task, clients in zip(images_stream(three_and_three()), three_and_three(), strict=True):
        theirs.training.lr = 0.05 * (factor if task.index else 1)
        learn_image_task(theirs, tiny_problem(), server, task, clients)
    for name, value in server.network.state().items():
        assert_allclose(ours.network.state()[name].numpy(), value.numpy(), atol=2e-6, err_msg=name)


def test_the_teacher_holds_the_old_classes_on_the_images():
    """How far the old classes' distribution moves in the second task, on the images that were made for it."""
    synthesis = {"images": 48, "batch": 24, "g_steps": 20, "noise": 16, "lr_g": 0.01}
    moved = {0.0: 0.0, 2.0: 0.0}
    for seed in range(3):
        tasks = image_tasks(np.random.default_rng(seed), [3, 2], [[40], [30]])
        ends: dict[float, list] = {}
        for pre in moved:
            ends[pre] = []
            learn_images(
                lander({"rounds": 6, "epochs": 2, "lr": 0.02}, synthesis, pre=pre, final="last", loss_over="seen"),
                tiny_problem(),
                tasks,
                after=lambda _, server, kept=ends[pre]: kept.append(copy.deepcopy(server)),
            )
        images = ends[2.0][1].made["images"]
        for pre, servers in ends.items():
            before, after = (server.predict(images)[:, :3].softmax(dim=1) for server in servers)
            moved[pre] += float((after - before).abs().sum(dim=1).mean())
    assert moved[2.0] < 0.7 * moved[0.0]


# The model that a task ends with --------------------------------------------------------------------------------------


def fed(server, task: Task, losses: list[list[float]], samples: list[int]):
    """Rounds with uploads that add one to every number; what came into each round, and the end."""
    came = []
    for round_, of_clients in enumerate(losses):
        broadcast = server.broadcast(task, round_)
        came.append({name: value.clone() for name, value in server.sent.items()})
        for client, loss in enumerate(of_clients):
            upload = {name: value.double() + 1 for name, value in server.sent.items()}
            upload["loss"] = torch.tensor([loss], dtype=torch.float64)
            assert server.expects(task, round_).keys() == upload.keys()
            server.absorb(client, Message(upload, broadcast.stage, samples=samples[client]))
        server.finish_round()
    server.finish_task()
    return came, {name: value.clone() for name, value in server.network.state().items()}


def test_a_task_ends_with_the_model_that_came_into_the_round_of_the_lowest_total_loss():
    server = lander({"rounds": 4}).server(tiny_problem())
    tasks = [Task(0, range(2), 2), Task(1, range(2, 4), 4)]
    server.start_task(tasks[0])
    came, end = fed(server, tasks[0], [[9.0, 1.0], [2.0, 3.0], [4.0, 4.0], [1.0, 4.5]], [3, 5])
    assert same(end, came[1])
    assert server.ended_with == [1]
    assert server.report()["ended_with"] == [1]
    # Losses of the earlier task no longer count; the first of equals stays.
    server.method.pre = 0.0
    server.start_task(tasks[1])
    came, end = fed(server, tasks[1], [[99.0, 9.0], [50.0, 8.0], [8.0, 50.0], [60.0, 6.0]], [3, 5])
    assert same({name: end[name] for name in came[1]}, came[1])
    assert server.ended_with == [1, 1]
    assert not server.best


def test_with_other_participants_the_loss_counts_per_sample():
    server = lander({"rounds": 2}).server(tiny_problem())
    task = Task(0, range(2), 2)
    server.start_task(task)
    came, end = fed(server, task, [[3.0], [5.0, 4.0]], [10, 90])  # 0.3, then 0.09 for each sample
    assert same(end, came[1])


def test_final_last_takes_the_last_average_and_no_loss_travels():
    server = lander({"rounds": 2}, final="last").server(tiny_problem())
    task = Task(0, range(2), 2)
    server.start_task(task)
    server.broadcast(task, 0)
    assert "loss" not in server.expects(task, 0)
    assert server.report() == {}
    ours, other = (federation(lander({"rounds": 3}, final=final), pictures()[:1]) for final in ("last", "best"))
    assert len(other.server.ended_with) == 1
    assert not same(model_of(ours), model_of(other))


def test_the_loss_that_travels_is_the_incoming_models_on_the_first_epoch():
    """One batch an epoch: the first loss is that of the broadcast model in training mode."""
    problem, method = tiny_problem(), lander({"batch_size": 64, "epochs": 3})
    server, client = method.server(problem), method.client(problem)
    tasks = pictures()
    [task, *_] = images_stream(tasks)
    server.start_task(task)
    broadcast, shard = server.broadcast(task, 0), image_shard(0, 0, *tasks[0][0])
    upload = turn(client, shard, broadcast)
    network = server.network.train()
    features = network.body(client.trainer.standardise(shard.inputs))
    pulled = (network.mapping(features) - server.anchors["anchors.0"][shard.labels]).square().mean() - 0.015
    expected = torch.nn.functional.cross_entropy(network.logits(features), shard.labels) + 5 * pulled.clamp(min=0)
    assert float(upload["loss"][0]) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert upload["loss"].dtype == torch.float32
    assert client._objective is None


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, {"send": "generator"}], ids=str)
def test_a_resumed_run_is_an_uninterrupted_one(knobs):
    method = lander({"fraction": 0.7, "rounds": 3}, **knobs)
    whole, _ = assert_resumes(lambda: federation_of(method, tiny_problem(), pictures()), step=3)
    assert len(whole.server.ended_with) == len(SIZES)


def test_a_run_that_stops_before_its_best_round_is_over_knows_the_best(tmp_path):
    """The state between rounds holds the best model so far."""
    server = lander({"rounds": 3}).server(tiny_problem())
    task = Task(0, range(2), 2)
    server.start_task(task)
    came, _ = fed(server, task, [[1.0], [2.0]], [4])
    state = {name: value.clone() for name, value in server.state_dict().items()}
    assert same({name: state[f"best.{name}"] for name in came[0]}, came[0])
    again = lander({"rounds": 3}).server(tiny_problem())
    again.load_state_dict(state)
    again.start_task(task)
    again.broadcast(task, 2)
    again.absorb(0, Message({**again.sent, "loss": torch.tensor([3.0])}, samples=4))
    again.finish_round()
    assert same(again.network.state(), came[0])
    assert again.ended_with == [0]


def test_anchors_are_by_column_in_whatever_order_a_checkpoint_has_them():
    """By name, the tenth task's come before the second's."""
    method = lander(pre=0.0)
    server = method.server(tiny_problem())
    for index in range(12):
        server.start_task(Task(index, range(index, index + 1), index + 1))
    expected = random_anchors(range(12), 6, derived_seed(0, "anchors") % 2**62)
    assert torch.equal(server.all_anchors(), expected)
    again = method.server(tiny_problem())
    again.load_state_dict(dict(sorted(server.state_dict().items())))
    assert torch.equal(again.all_anchors(), expected)


def test_classes_may_come_back_and_clients_come_late():
    """The third task has a class of the first again; client 2 comes with the second task."""
    tasks = pictures()
    tasks[2] = [(images, torch.where(labels == 5, 0, labels)) for images, labels in tasks[2]]
    tasks[2] = [(images, torch.where(labels == 6, 5, labels)) for images, labels in tasks[2]]
    ours = federation(lander(), tasks)
    assert [tuple(a.shape) for a in ours.server.anchors.values()] == [(3, 6), (2, 6), (1, 6)]
    assert ours.server.made["images"].shape == (20, 3, 8, 8)
    assert ours.server.made["labels"].max() == 4
    assert all(bool(torch.isfinite(value).all()) for value in model_of(ours).values())


def test_the_prediction_needs_no_mapping():
    server = learn_images(lander(), tiny_problem(), pictures()[:1])
    assert not any(name.startswith("mapping") for name in server.model())
    assert any(name.startswith("mapping") for name in server.network.state())


def test_anchors_of_a_file_are_by_the_data_sets_classes(tmp_path):
    path = tmp_path / "anchors.npz"
    rows = np.arange(60, dtype=np.float32).reshape(10, 6)
    np.savez(path, anchors=rows)
    method = lander(anchors=str(path))
    method.check(tiny_problem(), [3, 2])
    server = method.server(tiny_problem())
    server.start_task(Task(0, range(3), 3, classes=(7, 0, 9)))
    assert server.anchors["anchors.0"].tolist() == rows[[7, 0, 9]].tolist()
    server.method.pre = 0.0
    with pytest.raises(UserError, match=r"method\.anchors=.* has 10 anchors, none for class 12"):
        server.start_task(Task(1, range(3, 5), 5, classes=(3, 12)))
    with pytest.raises(UserError, match=r"method\.anchors=.* has 10 anchors \(one for each of 11 classes\)"):
        method.check(tiny_problem(), [6, 5])
    with pytest.raises(UserError, match=r"method\.anchor_size=512: .* 6 numbers \(method\.anchor_size=6\)"):
        lander(anchors=str(path), anchor_size=512).check(tiny_problem(), [3])


# Knobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [
        {"radius": -1},
        {"ltc": None},
        {"cur": 0},
        {"pre": -1},
        {"anchor_size": 0},
        {"anchors": " "},
        {"final": "first"},
        {"send": "features"},
        {"synthesis": {"batch": 1}},
        {"synthesis": {"g_steps": 0}},
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(LANDER, knobs, "method")


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({}, r"method\.training\.weighting=samples contradicts method\.variant=published"),
        ({"final": "last"}, r"method\.final=last contradicts"),
        ({"send": "generator"}, r"method\.send=generator contradicts"),
    ],
)
def test_what_contradicts_the_published_variant_is_told(knobs, told):
    with pytest.raises(UserError, match=told):
        typed_instance(LANDER, {"variant": "published", **knobs}, "method")


def test_features_are_refused():
    with pytest.raises(UserError, match=r"method\.on=features: method=lander makes images"):
        LANDER(on="features").check(tiny_problem(), [2])
