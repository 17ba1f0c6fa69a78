"""Activation columns: the layers' true inputs, a uniform choice without repetition; and Gram matrices of all inputs."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fcl_bench.training.layer_inputs import HEADS, layer_columns, layer_grams, projectable
from fcl_bench.training.trainer import FORWARD_BATCH
from tests.methods.training_harness import tiny_context
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

STARTS = {
    "tiny": lambda: tiny_context().network,
    "resnet": lambda: timm_start("test_resnet"),
    "resnet with cifar stem": lambda: timm_start("test_resnet", stem="cifar"),
    **{name: (lambda knobs=knobs: timm_start("test_vit", **knobs)) for name, knobs in VITS.items()},
}


# The columns are the layers' inputs -----------------------------------------------------------------------------------


@pytest.mark.slow_cases("resnet with cifar stem")
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_columns_are_the_layers_true_inputs_each_at_most_once(start):
    network, trainer = network_and_trainer(start())
    images = images_of(5, 32)
    counting = [dict(module._forward_pre_hooks) for module in network.modules()]  # the body's, from the start
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
    assert [dict(module._forward_pre_hooks) for module in network.modules()] == counting


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
    start = tiny_context().network
    network, trainer = network_and_trainer(start)
    images = images_of(7)
    expected = chosen_from(network.eval(), trainer, images, 20)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    again = chosen_from(network.train(), trainer, images, 20)
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# The choice -----------------------------------------------------------------------------------------------------------


def test_the_choice_follows_from_the_generator_alone():
    network, trainer = network_and_trainer(tiny_context().network)
    images = images_of(40)
    first, again, other = (chosen_from(network, trainer, images, 16, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(as_counter(first[name]) != as_counter(other[name]) for name in first)


@pytest.mark.parametrize(("n", "count"), [(5, 10**6), (5, 33), (60, 60), (60, 25), (300, 200), (300, 512)])
def test_batches_do_not_matter(monkeypatch, n, count):
    """The chosen columns are the same whether the images come at once, or seven by seven."""
    network, trainer = network_and_trainer(tiny_context().network)
    images = images_of(n)
    monkeypatch.setitem(FORWARD_BATCH, "cpu", 1000)
    whole = chosen_from(network, trainer, images, count)
    monkeypatch.setitem(FORWARD_BATCH, "cpu", 7)
    for name, columns in chosen_from(network, trainer, images, count).items():
        torch.testing.assert_close(columns, whole[name], atol=1e-5, rtol=1e-5)


@pytest.mark.slow_cases("n = m_s", "n > m_s")
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
    network, trainer = network_and_trainer(tiny_context().network)
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
    network, trainer = network_and_trainer(tiny_context().network)
    images = images_of(100)
    features = true_columns(network, trainer, images, [HEADS])[HEADS][:, :, 0]
    chosen = chosen_from(network, trainer, images, 30)[HEADS]
    assert chosen.shape[1] == 30
    nearest = torch.cdist(chosen.T, features, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
    assert (nearest.values < 1e-4).all()
    assert len(set(nearest.indices.tolist())) == 30


# Gram matrices --------------------------------------------------------------------------------------------------------


def test_gram_matrices_are_those_of_all_inputs_whatever_the_batches():
    start = tiny_context(architecture="vit").network
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
