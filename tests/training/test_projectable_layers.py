"""Which layers have an input subspace: plain ones that are called; all others are frozen after the first task."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame
from torch import nn

from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.protocol.context import Context, TestBatch, WireFormat
from fcl_bench.randomness import seeded
from fcl_bench.training.knobs import Training
from fcl_bench.training.layer_inputs import HEADS, projectable
from tests.methods.training_harness import CPU, image_tasks, learn_images
from tests.training.layer_inputs_oracle import (
    VITS,
    as_counter,
    chosen_from,
    images_of,
    made_of,
    network_and_trainer,
    timm_start,
    true_columns,
)


def odd_body() -> nn.Module:
    """Layers with and without an input subspace."""
    with seeded(0):
        return nn.Sequential(
            OrderedDict(
                plain=nn.Conv2d(3, 8, 3, padding=1, bias=False),
                grouped=nn.Conv2d(8, 8, 3, padding=1, groups=2),
                depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8),
                same=Conv2dSame(8, 8, 3, stride=2),
                reflected=nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
                named_same=nn.Conv2d(8, 8, 3, padding="same", dilation=2),
                valid=nn.Conv2d(8, 8, (2, 3), padding="valid", stride=(1, 2)),
                relu=nn.ReLU(),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                bilinear=nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)),
            )
        )


PLAIN = ["body.plain", "body.named_same", "body.valid", "body.bilinear.0"]
ODD = ["body.grouped", "body.depthwise", "body.same", "body.reflected"]


def test_only_plain_convolutions_and_linear_layers_have_an_input_subspace():
    network, trainer = network_and_trainer(made_of(odd_body()))
    assert list(projectable(network)) == PLAIN
    images = images_of(9)
    # What F.unfold calls the paddings "same" and "valid".
    same = true_columns(network, trainer, images, ["body.plain", "body.bilinear.0", HEADS])
    chosen = chosen_from(network, trainer, images, 10**6)
    for name, columns in same.items():
        assert as_counter(chosen[name]) == as_counter(columns.transpose(0, 1).flatten(1))
    assert chosen["body.named_same"].shape == (72, 9 * 16)
    assert chosen["body.valid"].shape == (48, 9 * 3)


def test_layers_without_an_input_subspace_are_frozen_after_the_first_task():
    start = made_of(odd_body())
    context = Context(6, 0, torch.float64, CPU, WireFormat(torch.float32), start)
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[12, 10], [9, 12]])
    training = Training(rounds=2, epochs=2, batch_size=8, lr=0.05, augment="none")
    states = []

    def after(task, server):
        states.append({name: value.clone() for name, value in server.network.state_dict().items()})

    method = FedProTIP(training=training, frozen_stages=0, columns=4, threshold=0.3)
    server = learn_images(method, context, tasks, after=after)
    assert list(server.widths()) == [*PLAIN, HEADS]
    moved = {name for name, value in states[0].items() if not torch.equal(value, states[1][name])}
    assert moved == {f"{name}.weight" for name in PLAIN}
    start_state = start.build().state_dict()
    assert all(not torch.equal(states[0][f"{name}.weight"], start_state[f"{name[5:]}.weight"]) for name in ODD)


def test_tensorflows_padding_and_depthwise_layers_of_a_mobile_network_are_left_out():
    start = timm_start("test_efficientnet", 64, model_args={"pad_type": "same"})
    network, trainer = network_and_trainer(start)
    convolutions = {
        f"body.{name}": module for name, module in network.body.named_modules() if isinstance(module, nn.Conv2d)
    }
    left_out = convolutions.keys() - projectable(network).keys()
    assert any(isinstance(convolutions[name], Conv2dSame) for name in left_out)
    assert any(convolutions[name].groups > 1 for name in left_out)
    assert all(type(convolutions[name]) is not nn.Conv2d or convolutions[name].groups > 1 for name in left_out)
    images = images_of(4, 64)
    truth = true_columns(network, trainer, images, list(projectable(network)))
    for name, columns in chosen_from(network, trainer, images, 25, layers=list(truth)).items():
        assert not as_counter(columns) - as_counter(truth[name].transpose(0, 1).flatten(1)), name


@pytest.mark.slow_cases("vit", "vit with adapters")
@pytest.mark.parametrize("knobs", VITS.values(), ids=VITS.keys())
def test_a_vit_learns_two_tasks_and_moves_only_what_it_protects(knobs):
    start = timm_start("test_vit", **knobs)
    context = Context(start.dimension, 0, torch.float64, CPU, WireFormat(torch.float32), start)
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[16, 12], [12, 16]], size=32)
    training = Training(rounds=1, epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=5e-2, augment="none")
    states, bases = [], {}

    def after(task, server):
        states.append({name: value.clone() for name, value in server.network.state_dict().items()})
        if task.index == 0:
            bases.update({layer: server.known(layer) for layer in server.widths()})

    method = FedProTIP(training=training, frozen_stages=0, columns=64, threshold=0.2)
    server = learn_images(method, context, tasks, after=after)
    linear = {name for name, module in projectable(server.network).items() if module.weight.requires_grad}
    if "adapters" in knobs:
        assert linear == {f"body.blocks.{b}.mlp.{part}" for b in range(6) for part in ("down", "up")}
    else:
        assert linear == projectable(server.network).keys()
        assert "body.patch_embed.proj" in linear
    assert set(bases) == {*linear, HEADS}
    moved = {name for name, value in states[0].items() if not torch.equal(value, states[1][name])}
    assert moved == {f"{name}.weight" for name in linear}
    for name in linear:
        change = (states[1][f"{name}.weight"].double() - states[0][f"{name}.weight"].double()).flatten(1)
        assert change.norm() > 0
        assert (change @ bases[name]).norm() <= 1e-5 * change.norm()
    prediction = server.classify(TestBatch.of(tasks[1][0][0]))
    assert prediction.scores.shape == (12, 4)
    assert prediction.tasks is not None
    assert torch.isfinite(prediction.scores).all()


# Known bugs -----------------------------------------------------------------------------------------------------------


class Windows(nn.Module):
    """As in Swin: the linear layer sees four windows of an image as samples of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 6)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        b, c, h, w = images.shape
        windows = images.view(b, c, 2, h // 2, 2, w // 2).permute(0, 2, 4, 3, 5, 1).reshape(4 * b, -1, c)
        return self.inner(windows).view(b, -1, 6).mean(dim=1)


class Functional(nn.Module):
    """As the attention of BEiT, EVA and Swin v2: a linear layer whose weights are used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 6, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.linear(images.mean(dim=(2, 3)), self.inner.weight)


@pytest.mark.parametrize("n", [40, 300])
def test_windows_of_an_image_are_columns_of_that_image(n):
    network, trainer = network_and_trainer(made_of(Windows()))
    images = images_of(n)
    columns = chosen_from(network, trainer, images, 512, layers=["body.inner"])["body.inner"]
    assert columns.shape == (3, 512)
    every = trainer.standardise(images).flatten(2).permute(1, 0, 2)
    assert not as_counter(columns) - as_counter(every.flatten(1))
    # All images are as likely: of 40 x 64 or 300 x 64 places, the last half must be among 512.
    assert as_counter(columns) & as_counter(every[:, n // 2 :].flatten(1))
    assert len(as_counter(columns) & as_counter(every[:, : n // 2].flatten(1))) < 320


def test_a_layer_that_is_never_called_is_no_error():
    """It has no inputs to protect, so it had better be frozen like every other weight without an input subspace."""
    start = made_of(Functional())
    context = Context(6, 0, torch.float64, CPU, WireFormat(torch.float32), start)
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[12, 10], [9, 12]])
    states = []
    method = FedProTIP(training=Training(rounds=1, epochs=1, batch_size=8, augment="none"), frozen_stages=0)
    learn_images(
        method, context, tasks, after=lambda _, server: states.append(server.network.body.inner.weight.detach().clone())
    )
    assert torch.equal(*states)
