"""LANDER: the client's loss against NumPy, its limits, the model that a task ends with."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.data_free.generators.anchored import MappedNetwork, random_anchors
from fcl_bench.methods.data_free.lander import LANDER, Bounded, factors
from fcl_bench.protocol.context import Task
from fcl_bench.randomness import seeded
from fcl_bench.training.network import Heads
from tests.methods.classical_harness import exchanged, federation, pictures, training
from tests.methods.classical_oracle import softmax
from tests.methods.harness import turn
from tests.methods.lander_harness import fed, lander
from tests.methods.training_harness import (
    image_shard,
    image_tasks,
    images_stream,
    learn_image_task,
    learn_images,
    tiny_context,
)
from tests.methods.whole_runs import model_of, same

# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seen", "known", "cur", "pre"), [(20, 10, 0.364603, 0.978475), (100, 90, 0.247984, 2.152534)])
def test_the_factors_of_old_and_new(seen, known, cur, pre):
    method = LANDER()
    of_current, of_previous = factors(seen, known)
    assert method.cur * of_current == pytest.approx(cur, abs=5e-7)
    assert method.pre * of_previous == pytest.approx(pre, abs=5e-7)


def mapped_network(heads: list[int], seed: int) -> MappedNetwork:
    network = MappedNetwork(tiny_context().network, 6, seed=seed)
    network.grow(heads, seed=seed)
    with seeded(seed), torch.no_grad():
        for value in network.parameters():
            value.add_(0.05 * torch.randn(value.shape))
    return network.double().eval()


class Given:
    """A pool of given images."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def next(self, count: int) -> torch.Tensor:
        return self.images[:count]


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
    method = lander({"batch_size": 9}, ltc=ltc, radius=r)
    objective = Bounded(heads, method, anchors, 0.3, 1.7, teacher, Given(synthetic))
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
    objective = Bounded(Heads(((0, 1),), (0, 1)), lander(), None)
    objective._losses = [torch.tensor(float(2**step)) for step in range(6)]
    assert objective.first_pass(2).tolist() == [1 + 2 + 4]
    objective._losses = []
    assert objective.first_pass(2).tolist() == [0]


# Limits ---------------------------------------------------------------------------------------------------------------


def test_inside_a_huge_ball_the_first_task_is_fedavg_bit_for_bit_but_for_the_mapping():
    """Which has no gradient but weight decay's."""
    first = pictures()[:1]
    ours = model_of(federation(lander(final="last", radius=1e6), first))
    theirs = model_of(federation(FedAvg(training(), loss_classes="task"), first))
    assert same({name: value for name, value in ours.items() if not name.startswith("mapping")}, theirs)
    small = model_of(federation(lander(final="last"), first))
    assert not same({name: value for name, value in small.items() if not name.startswith("mapping")}, theirs)


def three_and_three():
    return image_tasks(np.random.default_rng(0), [3, 3], [[9, 7, 0], [8, 0, 7]])


@pytest.mark.parametrize("over", ["task", "seen"])
def test_without_both_terms_and_at_factor_1_it_is_fedavg_bit_for_bit_and_byte_for_byte(over):
    """Of 6 classes 3 are old: (1 + 1/a) / b = 1.5 / sqrt(1/2)."""
    factor = factors(6, 3)[0]
    assert factor == pytest.approx(1.5 * math.sqrt(2))
    cur = 1 / factor
    assert cur * factor == 1
    ours = federation(lander(ltc=0.0, pre=0.0, cur=cur, final="last", loss_classes=over), three_and_three())
    theirs = federation(FedAvg(training(), loss_classes=over), three_and_three())
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)
    other = federation(lander(ltc=0.0, pre=0.0, cur=0.9 * cur, final="last", loss_classes=over), three_and_three())
    assert not same(model_of(other), model_of(theirs))


def test_cur_alone_scales_the_steps_of_fedavg():
    """Without momentum and weight decay a loss times c is a step size times c."""
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    ours = learn_images(lander(plain, ltc=0.0, pre=0.0, cur=0.1, final="last"), tiny_context(), three_and_three())
    theirs = FedAvg(training(**plain), loss_classes="task")
    server = theirs.server(tiny_context())
    factor = 0.1 * factors(6, 3)[0]
    for task, clients in zip(images_stream(three_and_three()), three_and_three(), strict=True):
        theirs.training.lr = 0.05 * (factor if task.index else 1)
        learn_image_task(theirs, tiny_context(), server, task, clients)
    for name, value in server.network.state().items():
        assert_allclose(ours.network.state()[name].numpy(), value.numpy(), atol=2e-6, err_msg=name)


@pytest.mark.slow
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
                lander({"rounds": 6, "epochs": 2, "lr": 0.02}, synthesis, pre=pre, final="last", loss_classes="seen"),
                tiny_context(),
                tasks,
                after=lambda _, server, kept=ends[pre]: kept.append(copy.deepcopy(server)),
            )
        images = ends[2.0][1].made["images"]
        for pre, servers in ends.items():
            before, after = (server.predict(images)[:, :3].softmax(dim=1) for server in servers)
            moved[pre] += float((after - before).abs().sum(dim=1).mean())
    assert moved[2.0] < 0.7 * moved[0.0]


# The model that a task ends with --------------------------------------------------------------------------------------


def test_a_task_ends_with_the_model_that_came_into_the_round_of_the_lowest_total_loss():
    server = lander({"rounds": 4}).server(tiny_context())
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
    server = lander({"rounds": 2}).server(tiny_context())
    task = Task(0, range(2), 2)
    server.start_task(task)
    came, end = fed(server, task, [[3.0], [5.0, 4.0]], [10, 90])  # 0.3, then 0.09 for each sample
    assert same(end, came[1])


def test_final_last_takes_the_last_average_and_no_loss_travels():
    server = lander({"rounds": 2}, final="last").server(tiny_context())
    task = Task(0, range(2), 2)
    server.start_task(task)
    assert "loss" not in server.schema(task, server.broadcast(task, 0).stage)
    assert server.report() == {}
    ours, other = (federation(lander({"rounds": 3}, final=final), pictures()[:1]) for final in ("last", "best"))
    assert len(other.server.ended_with) == 1
    assert not same(model_of(ours), model_of(other))


def test_the_loss_that_travels_is_the_incoming_models_on_the_first_epoch():
    """One batch an epoch: the first loss is that of the broadcast model in training mode."""
    context, method = tiny_context(), lander({"batch_size": 64, "epochs": 3})
    server, client = method.server(context), method.client(context)
    tasks = pictures()
    [task, *_] = images_stream(tasks)
    server.start_task(task)
    broadcast, client_data = server.broadcast(task, 0), image_shard(0, 0, *tasks[0][0])
    upload = turn(client, client_data, broadcast)
    network = server.network.train()
    features = network.body(client.trainer.standardise(client_data.inputs))
    pulled = (network.mapping(features) - server.anchors["anchors.0"][client_data.labels]).square().mean() - 0.015
    expected = torch.nn.functional.cross_entropy(network.logits(features), client_data.labels) + 5 * pulled.clamp(min=0)
    assert float(upload["loss"][0]) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert upload["loss"].dtype == torch.float32
    assert client._objective is None
