"""Activation columns: the layers' true inputs, a uniform choice without repetition, and only where there are any."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame
from torch import nn

from fcl_bench.backbones.adapters import Adapters
from fcl_bench.backbones.timm_backbone import Timm, Transform
from fcl_bench.backbones.trainable import Trainable, copies, seeded
from fcl_bench.data.images.batches import Standardise
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.sources.image_source import image_split
from fcl_bench.methods.gradient.fedprotip import FedProTIP
from fcl_bench.protocol.problem import Problem, TestBatch
from fcl_bench.protocol.wire import WireFormat
from fcl_bench.training.knobs import Training
from fcl_bench.training.layer_inputs import HEADS, layer_columns, layer_grams, projectable
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import FORWARD_BATCH, Trainer
from tests.methods.training_harness import CPU, image_tasks, learn_images, tiny_problem


def images_of(count: int, size: int = 8, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (count, 3, size, size), dtype=np.uint8))


def network_and_trainer(start: Trainable, seed: int = 0) -> tuple[Network, Trainer]:
    """The network after something like training: batch norms with statistics of their own."""
    network = Network(start)
    rng = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                tensor.data.uniform_(0.5, 2, generator=rng)
            for tensor in (module.bias, module.running_mean):
                tensor.data.uniform_(-1, 1, generator=rng)
    return network, Trainer(Training(augment="none"), Standardise(start.size, start.mean, start.std), CPU)


def made_of(body: nn.Module, size: int = 8, dimension: int = 6) -> Trainable:
    return Trainable("made", copies(body), dimension, size, (0.5,) * 3, (0.25,) * 3, (), {})


def true_columns(network: Network, trainer: Trainer, images: torch.Tensor, names: list[str]) -> dict[str, torch.Tensor]:
    """Every column (n, d, places) of the layers, from hooks of our own; all images at once."""
    seen: dict[str, torch.Tensor] = {}
    modules = {f"body.{name}": module for name, module in network.body.named_modules()}

    def keep(name):
        def hook(module, inputs, output):
            seen[name] = inputs[0].detach().clone()

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in names if name != HEADS]
    network.eval()
    with torch.no_grad():
        seen[HEADS] = network.body(trainer.standardise(images))
    for handle in handles:
        handle.remove()
    found = {}
    for name in names:
        inputs, module = seen[name], modules.get(name)
        if isinstance(module, nn.Conv2d):
            columns = F.unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride)
        else:
            columns = inputs.reshape(len(images), -1, inputs.shape[-1]).transpose(1, 2)
        found[name] = columns
    return found


def as_counter(columns: torch.Tensor) -> Counter[bytes]:
    return Counter(column.numpy().tobytes() for column in columns.T.contiguous())


def chosen_from(
    network: Network, trainer: Trainer, images: torch.Tensor, count: int, seed: int = 0, layers: list[str] | None = None
) -> dict[str, torch.Tensor]:
    layers = [*projectable(network), HEADS] if layers is None else layers
    return layer_columns(trainer, network, images, layers, count, torch.Generator().manual_seed(seed))


def timm_start(name: str, size: int = 32, **knobs) -> Trainable:
    split = image_split([0, 1], ArrayImages(np.zeros((2, size, size, 3), dtype=np.uint8)))
    backbone = Timm(name, pretrained=False, **{"transform": Transform(size=size), **knobs})
    return backbone.trainable(Dataset("made", split, split), 0)


#: A ViT of timm's own tests at a size that it takes, with and without adapters.
VITS = {
    "vit": {"model_args": {"img_size": 32, "patch_size": 8}},
    "vit with adapters": {"model_args": {"img_size": 32, "patch_size": 8}, "adapters": Adapters(8)},
}
STARTS = {
    "tiny": lambda: tiny_problem().network,
    "resnet": lambda: timm_start("test_resnet"),
    "resnet with cifar stem": lambda: timm_start("test_resnet", stem="cifar"),
    **{name: (lambda knobs=knobs: timm_start("test_vit", **knobs)) for name, knobs in VITS.items()},
}


# The columns are the layers' inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_columns_are_the_layers_true_inputs_each_at_most_once(start):
    network, trainer = network_and_trainer(start())
    images = images_of(5, 32)
    truth = true_columns(network, trainer, images, [*projectable(network), HEADS])
    # A few of very many, and all there are.
    for count in (5, 30, 10**6):
        chosen = chosen_from(network, trainer, images, count)
        assert chosen.keys() == truth.keys()
        for name, columns in chosen.items():
            every = truth[name].transpose(0, 1).flatten(1)
            assert columns.shape == (every.shape[0], min(count, every.shape[1]))
            assert columns.dtype == torch.float32
            surplus = as_counter(columns) - as_counter(every)
            assert not surplus, name
    assert all(module.training is False for module in network.modules())
    assert not any(module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize("start", [STARTS["tiny"], STARTS["vit"]], ids=["tiny", "vit"])
def test_a_layers_weights_act_on_its_columns(start):
    """W times the columns is what the layer puts out: rows of W live in the space of the columns."""
    network, trainer = network_and_trainer(start())
    images, outputs = images_of(4, 32), {}
    for name, module in projectable(network).items():
        module.register_forward_hook(lambda module, inputs, output, name=name: outputs.update({name: output}))
    everything = chosen_from(network, trainer, images, 10**6)
    for name, module in projectable(network).items():
        output = outputs[name]
        flat = output.transpose(0, 1) if isinstance(module, nn.Conv2d) else output.movedim(-1, 0)
        bias = 0 if module.bias is None else module.bias.detach()[:, None]
        ours = module.weight.detach().flatten(1) @ everything[name] + bias
        # All columns, in order: images, and within each the places.
        torch.testing.assert_close(ours, flat.flatten(1), atol=1e-4, rtol=1e-4)


def test_columns_are_of_the_network_in_evaluation_mode_whatever_it_was_in():
    start = tiny_problem().network
    network, trainer = network_and_trainer(start)
    images = images_of(7)
    expected = chosen_from(network.eval(), trainer, images, 20)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    again = chosen_from(network.train(), trainer, images, 20)
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# The choice -----------------------------------------------------------------------------------------------------------


def test_the_choice_follows_from_the_generator_alone():
    network, trainer = network_and_trainer(tiny_problem().network)
    images = images_of(40)
    first, again, other = (chosen_from(network, trainer, images, 16, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(as_counter(first[name]) != as_counter(other[name]) for name in first)


@pytest.mark.parametrize(("n", "count"), [(5, 10**6), (5, 33), (60, 60), (60, 25), (300, 200), (300, 512)])
def test_batches_do_not_matter(monkeypatch, n, count):
    """The chosen columns are the same whether the images come at once, or seven by seven."""
    network, trainer = network_and_trainer(tiny_problem().network)
    images = images_of(n)
    monkeypatch.setitem(FORWARD_BATCH, "cpu", 1000)
    whole = chosen_from(network, trainer, images, count)
    monkeypatch.setitem(FORWARD_BATCH, "cpu", 7)
    for name, columns in chosen_from(network, trainer, images, count).items():
        torch.testing.assert_close(columns, whole[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("n", "count"), [(3, 8), (8, 8), (20, 8)], ids=["n < m_s", "n = m_s", "n > m_s"])
def test_every_image_and_place_is_equally_likely(n, count):
    """First layer: 4 x 4 patches of the network's own stride and padding. Chi-squared over every single column."""
    size = 4
    body = nn.Sequential(
        OrderedDict(conv=nn.Conv2d(3, 2, 3, padding=1), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten())
    )
    network, trainer = network_and_trainer(made_of(body, size, 2))
    images = images_of(n, size)
    every = true_columns(network, trainer, images, ["body.conv"])["body.conv"].transpose(0, 1).flatten(1)
    index = {column.numpy().tobytes(): i for i, column in enumerate(every.T.contiguous())}
    assert len(index) == every.shape[1] == n * size * size
    trials, hits = 600, np.zeros(n * size * size)
    generator = torch.Generator().manual_seed(0)
    for _ in range(trials):
        columns = layer_columns(trainer, network, images, ["body.conv"], count, generator)["body.conv"]
        chosen = [index[column.numpy().tobytes()] for column in columns.T.contiguous()]
        assert len(set(chosen)) == len(chosen) == count
        hits[chosen] += 1
    expected = trials * count / len(hits)
    for counts in (hits, hits.reshape(n, -1).sum(axis=1), hits.reshape(n, -1).sum(axis=0)):
        mean = expected * len(hits) / len(counts)
        statistic, freedom = ((counts - mean) ** 2 / mean).sum(), len(counts) - 1
        # At most five standard deviations above what chance gives (columns of one choice differ, so rather less).
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_few_images_give_few_columns_of_pooled_features_and_enough_patches():
    """n < m_s: every image is in; a layer on pooled features then has n columns."""
    network, trainer = network_and_trainer(tiny_problem().network)
    images = images_of(6)
    chosen = chosen_from(network, trainer, images, 50)
    features = true_columns(network, trainer, images, [HEADS])[HEADS][:, :, 0]
    assert as_counter(chosen[HEADS]) == as_counter(features.T)
    assert {name: columns.shape[1] for name, columns in chosen.items()} == {
        "body.stage1.0": 50,
        "body.stage2.0": 50,
        "body.stage3.0": min(50, 6 * 4),
        "body.stage4.0": min(50, 6 * 4),
        HEADS: 6,
    }
    assert chosen_from(network, trainer, images[:1], 50)[HEADS].shape[1] == 1


def test_many_images_give_one_feature_column_each_of_as_many_as_wanted():
    network, trainer = network_and_trainer(tiny_problem().network)
    images = images_of(100)
    features = true_columns(network, trainer, images, [HEADS])[HEADS][:, :, 0]
    chosen = chosen_from(network, trainer, images, 30)[HEADS]
    assert chosen.shape[1] == 30
    nearest = torch.cdist(chosen.T, features, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
    assert (nearest.values < 1e-4).all()
    assert len(set(nearest.indices.tolist())) == 30


# Which layers ---------------------------------------------------------------------------------------------------------


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
    problem = Problem(6, 0, torch.float64, CPU, WireFormat(torch.float32), start)
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[12, 10], [9, 12]])
    training = Training(rounds=2, epochs=2, batch_size=8, lr=0.05, augment="none")
    states = []

    def after(task, server):
        states.append({name: value.clone() for name, value in server.network.state_dict().items()})

    method = FedProTIP(training=training, frozen_stages=0, columns=4, threshold=0.3)
    server = learn_images(method, problem, tasks, after=after)
    assert list(server.bases) == [*PLAIN, HEADS]
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


@pytest.mark.parametrize("knobs", VITS.values(), ids=VITS.keys())
def test_a_vit_learns_two_tasks_and_moves_only_what_it_protects(knobs):
    start = timm_start("test_vit", **knobs)
    problem = Problem(start.dimension, 0, torch.float64, CPU, WireFormat(torch.float32), start)
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[16, 12], [12, 16]], size=32)
    training = Training(rounds=1, epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=5e-2, augment="none")
    states, bases = [], {}

    def after(task, server):
        states.append({name: value.clone() for name, value in server.network.state_dict().items()})
        if task.index == 0:
            bases.update({layer: found[0].double() for layer, found in server.bases.items()})

    method = FedProTIP(training=training, frozen_stages=0, columns=64, threshold=0.2)
    server = learn_images(method, problem, tasks, after=after)
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
    problem = Problem(6, 0, torch.float64, CPU, WireFormat(torch.float32), start)
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[12, 10], [9, 12]])
    states = []
    method = FedProTIP(training=Training(rounds=1, epochs=1, batch_size=8, augment="none"), frozen_stages=0)
    learn_images(
        method, problem, tasks, after=lambda _, server: states.append(server.network.body.inner.weight.detach().clone())
    )
    assert torch.equal(*states)


def test_gram_matrices_are_those_of_all_inputs_whatever_the_batches():
    start = tiny_problem(architecture="vit").network
    assert start is not None
    network, trainer = network_and_trainer(start)
    images = images_of(7)
    modules = {name: module for name, module in projectable(network).items() if isinstance(module, nn.Linear)}
    names = ["body.blocks.1.attn.qkv", "body.blocks.2.mlp.fc2", HEADS]
    layers = {name: modules.get(name, network.heads) for name in names}
    found = layer_grams(trainer, network, images.split(3), layers, diagonal=[names[1]])
    true = true_columns(network, trainer, images, names)
    for name in names:
        X = true[name].transpose(1, 2).flatten(0, 1).double().numpy()
        expected = np.square(X).sum(axis=0) if name == names[1] else X.T @ X
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-4, atol=1e-4)
        assert found[name].dtype == torch.float64
