"""FedProTIP's updates: orthogonal to what is protected, and what does not change at all."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fcl_bench.backbones.backbone import frozen_names
from fcl_bench.backbones.timm_backbone import Timm, Transform
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.projection import fedprotip
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.projected import ProjectedObjective, basis_name
from fcl_bench.methods.projection.subspace import Projection
from fcl_bench.protocol.context import Context, WireFormat
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective
from tests.methods.fedprotip_harness import (
    HEADS,
    Observed,
    fedprotip_of,
    layer_of,
    observed,
    three_tasks,
    training,
)
from tests.methods.harness import turn
from tests.methods.training_harness import (
    CPU,
    ImageTasks,
    image_shard,
    image_tasks,
    images_stream,
    learn_images,
    tiny_context,
)

VARIANTS = {
    "default": {},
    "all heads train": {"frozen_heads": False},
    "only the task's classes compete": {"loss_classes": "task"},
    "every stage trains": {"frozen_stages": 0, "threshold": 0.3},
    "energy": {"mass": "energy", "threshold": 0.9},
    "sketches": {"sketch": 40},
}


@functools.cache
def variant(name: str) -> Observed:
    return observed(fedprotip_of(**VARIANTS[name]), tiny_context(), three_tasks())


@pytest.mark.slow_cases("all heads train", "default", "energy", "every stage trains", "sketches")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_update_is_orthogonal_to_the_protected_inputs(name):
    """After whole local trainings with momentum and weight decay, and after the server's average."""
    knobs, result = VARIANTS[name], variant(name)
    heads = {"heads.0.weight", "heads.1.weight", "heads.2.weight"} - (
        {"heads.0.weight"} if "frozen_heads" not in knobs else set()
    )
    stages = range(knobs.get("frozen_stages", 1) + 1, 5)
    assert result.projected == heads | {f"body.stage{stage}.0.weight" for stage in stages}
    # 2 rounds; 2 clients in task 1, 3 in task 2.
    weights = len(stages) + (1 if "frozen_heads" not in knobs else 2)
    assert len([row for row in result.clients if row[0] == 1]) == 2 * 2 * weights
    assert len([row for row in result.averages if row[0] == 1]) >= 2 * weights
    assert max(leak for *_, leak in result.clients) <= 1e-5
    assert max(leak for *_, leak in result.averages) <= 1e-5
    moved = [name for name in result.projected if name in result.states[0]]
    assert any(not torch.equal(result.states[-1][name], result.states[0][name]) for name in moved)


@pytest.mark.slow
def test_under_global_projection_clients_train_freely_and_only_the_average_is_orthogonal():
    """FedProTIP Fig. 5: W = W_old + (sum_k p_k W_k - W_old)(I - Phi Phi')."""
    result = observed(fedprotip_of(projection="global"), tiny_context(), three_tasks())
    leaks = pd.DataFrame(result.clients, columns=["task", "name", "leak"]).groupby("name").leak.min()
    assert (leaks > 1e-2).all()
    assert set(leaks.index) == variant("default").projected
    assert max(leak for *_, leak in result.averages) <= 1e-5
    # Local projection is linear: where a client makes a single step without momentum, both are the same.
    one = image_tasks(np.random.default_rng(0), [3, 2], [[12, 12], [12, 12]])
    ends = []
    for projection in ("local", "global"):
        method = fedprotip_of({"epochs": 1, "batch_size": 12, "momentum": 0.0}, projection=projection)
        ends.append(learn_images(method, tiny_context(), one).network.state_dict())
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-5) for name in ends[0])


def gradients_only(self: ProjectedObjective, network: Network) -> None:
    """Eq. 4 inside an ordinary optimiser: the raw gradient is projected, weight decay comes on top."""
    for weight, project, _ in self._projected:
        if weight.grad is not None:
            decay = 5e-2 * weight.detach()
            weight.grad -= decay
            project(weight.grad)
            weight.grad += decay


@pytest.mark.slow
def test_projecting_the_raw_gradient_only_is_found_out(monkeypatch):
    """Erratum 3: the same set-up as above must tell a wrong implementation."""
    monkeypatch.setattr(ProjectedObjective, "modify_gradients", gradients_only)
    monkeypatch.setattr(ProjectedObjective, "finish", Objective.finish)
    result = observed(fedprotip_of(), tiny_context(), three_tasks())
    by_weight = pd.DataFrame(result.clients, columns=["task", "name", "leak"]).groupby("name").leak.max()
    assert (by_weight > 1e-3).all()


@pytest.mark.slow
def test_a_resnets_updates_are_orthogonal_and_its_first_two_stages_frozen():
    """With the stem for small images; both defaults: two stages frozen, threshold 0.7."""
    split = image_split([0, 1], ArrayImages(np.zeros((2, 16, 16, 3), dtype=np.uint8)))
    backbone = Timm("resnet10t", pretrained=False, stem="cifar", transform=Transform(size=16))
    start = backbone.trainable(Dataset("made", split, split), 0)
    context = Context(512, 0, torch.float64, CPU, WireFormat(torch.float32), start)
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[8, 8], [8, 8]], size=16)
    method = FedProTIP(training=training(rounds=1, epochs=2, batch_size=4), columns=16, projected_heads=True)
    result = observed(method, context, tasks)
    convolutions = {
        f"body.{name}.weight"
        for name, module in start.build().named_modules()
        if isinstance(module, nn.Conv2d) and name.startswith(("layer3", "layer4"))
    }
    assert len(convolutions) == 6
    assert result.projected == convolutions | {"heads.1.weight"}
    assert max(leak for *_, leak in result.clients + result.averages) <= 1e-5
    moved = {name for name, value in result.states[0].items() if not torch.equal(value, result.states[1][name])}
    assert moved == convolutions


@pytest.mark.slow_cases("default", "energy", "sketches")  # what is frozen depends on the other knobs
@pytest.mark.parametrize("name", VARIANTS)
def test_everything_else_is_frozen_after_the_first_task(name):
    """Batch norms with their statistics, biases, first stages, old heads: bit for bit."""
    context, knobs, result = tiny_context(), VARIANTS[name], variant(name)
    first = {
        f"body.{name}"
        for name in frozen_names(context.network.build(), context.network.stages, knobs.get("frozen_stages", 1))
    }
    for task in (1, 2):
        before, now = result.states[task - 1], result.states[task]
        moved = {name for name, value in before.items() if not torch.equal(value, now[name])}
        assert moved
        assert moved <= result.projected
        assert not moved & first
        assert all(value.ndim > 1 for name, value in before.items() if name in moved)
        if "frozen_heads" not in knobs:
            assert not any(name.startswith("heads") for name in moved)
        assert not now[f"heads.{task}.bias"].any()
        for (of, stage, _), message in result.uploads.items():
            if of == task and stage == "model":
                assert set(message) <= result.projected
                assert f"heads.{task}.weight" in message


@pytest.mark.slow_cases("{'sketch': 9}", "{}")
@pytest.mark.parametrize("knobs", [{}, {"loss_classes": "task", "tip": None}, {"sketch": 9}], ids=str)
def test_the_first_task_is_plain_fedavg(knobs):
    """As fedavg leaves it, bit for bit: nothing is frozen or projected yet."""
    tasks, context = three_tasks()[:1], tiny_context()
    ours = learn_images(fedprotip_of(**knobs), context, tasks)
    plain = FedAvg(training=training(), loss_classes=knobs.get("loss_classes", "seen"))
    theirs = learn_images(plain, context, tasks).network.state_dict()
    state = ours.network.state_dict()
    assert state.keys() == theirs.keys()
    assert all(torch.equal(state[name], theirs[name]) for name in state)
    assert any(
        not torch.equal(state[f"body.{name}"], value) for name, value in context.network.build().state_dict().items()
    )


def test_a_clients_batch_norms_rest_while_it_trains_on_a_later_task():
    """They use and keep the first task's statistics: inputs under others would not be those that are protected."""
    context, method, tasks = tiny_context(), fedprotip_of(), three_tasks()
    update, broadcast = second_task(method, context, tasks)
    client, seen = method.client(context), []
    norm = client.network.body.stage3[1]
    norm.register_forward_hook(lambda module, inputs, output: seen.append((module.training, inputs[0], output.clone())))
    update(client)
    assert seen
    assert not any(training for training, *_ in seen)
    state = client.network.state_dict()
    for name in (f"body.stage{stage}.1.{own}" for stage in (1, 2, 3, 4) for own in ("running_mean", "running_var")):
        assert torch.equal(state[name], broadcast[name])
    mean, variance = (broadcast[f"body.stage3.1.running_{own}"].view(1, -1, 1, 1) for own in ("mean", "var"))
    weight, bias = (broadcast[f"body.stage3.1.{own}"].view(1, -1, 1, 1) for own in ("weight", "bias"))
    _, inputs, output = seen[-1]
    torch.testing.assert_close(output, (inputs - mean) / (variance + norm.eps).sqrt() * weight + bias)


class PlainClient(fedprotip.FedProTIPClient):
    """Trains what FedProTIP trains, without a projection."""

    def objective(self, client_data, broadcast, state):
        return Objective(Heads.from_message(broadcast), self.method.loss_classes)


def second_task(method: FedProTIP, context: Context, tasks: ImageTasks, change=lambda server: None):
    """A client's update in the first round of the second task after `change` of the server; and the broadcast."""
    server = learn_images(method, context, tasks[:1])
    change(server)
    task = images_stream(tasks)[1]
    server.start_task(task)
    broadcast = server.broadcast(task, 0)
    client_data = image_shard(0, 1, *tasks[1][0])
    return (lambda client: turn(client, client_data, broadcast)), broadcast


@pytest.mark.slow
def test_without_a_basis_training_is_plain():
    context, method, tasks = tiny_context(), fedprotip_of(), three_tasks()

    def forget(server):
        server.bases = {name: basis[:, :0] for name, basis in server.bases.items()}

    update, broadcast = second_task(method, context, tasks, forget)
    assert not any(name.startswith("basis") for name in broadcast)
    ours, plain = update(method.client(context)), update(PlainClient(method, context))
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in ours)
    # And with one they differ.
    update, _ = second_task(method, context, tasks)
    assert not torch.equal(update(method.client(context))["heads.1.weight"], plain["heads.1.weight"])


def test_a_basis_without_columns_changes_nothing_but_rounding():
    network = Network(tiny_context().network)
    network.grow([3], 0)
    names = ["body.stage2.0.weight", "heads.0.weight"]
    own = dict(network.named_parameters())
    before = {name: own[name].detach().clone() for name in names}
    empty = {name: Projection(torch.zeros(own[name][0].numel(), 0), own[name]) for name in names}
    objective = ProjectedObjective(Heads(((0, 1, 2),), (0, 1, 2)), fedprotip_of(), network, True, empty)
    for name in names:
        own[name].grad = torch.randn_like(own[name])
    gradients = {name: own[name].grad.clone() for name in names}
    objective.modify_gradients(network)
    assert all(torch.equal(own[name].grad, gradients[name]) for name in names)
    with torch.no_grad():
        for name in names:
            own[name].add_(gradients[name])
    objective.finish(network)
    for name in names:
        torch.testing.assert_close(own[name].detach(), before[name] + gradients[name])


def test_where_everything_is_protected_the_weights_do_not_move_at_all(caplog):
    context, method, tasks = tiny_context(), fedprotip_of(), three_tasks()
    full = ["body.stage3.0", HEADS]

    def protect(server):
        rng = torch.Generator().manual_seed(0)
        for layer in full:
            side = server.widths()[layer]
            Q = torch.linalg.qr(torch.randn(side, side, generator=rng, dtype=torch.float64)).Q
            server.bases[basis_name(0, layer)] = Q.float()

    update, broadcast = second_task(method, context, tasks, protect)
    message = update(method.client(context))
    for name in message:
        assert torch.equal(message[name], broadcast[name]) == (layer_of(name) in full), name


def test_a_full_layer_is_told_once(caplog):
    """Threshold 1 and more columns than directions."""
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[30, 30], [30, 30]])
    with caplog.at_level(logging.WARNING):
        server = learn_images(fedprotip_of({"rounds": 1, "epochs": 1}, threshold=1.0), tiny_context(), tasks)
    assert server.report()["ranks"]["body.stage2.0"] == [36, 0]
    assert caplog.text.count("all 36 directions of body.stage2.0 are protected") == 1


@pytest.mark.slow_cases("float16")
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_in_a_16_bit_type_the_average_is_still_orthogonal_to_the_protected_inputs(wire):
    result = observed(fedprotip_of(), tiny_context(wire=wire), three_tasks())
    assert max(leak for *_, leak in result.averages) <= 1e-5
