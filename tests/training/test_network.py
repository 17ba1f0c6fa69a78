"""The network that is trained: heads that grow, what freezes, what travels."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.backbones.backbone import Trainable, copies, frozen_names
from fcl_bench.backbones.timm_backbone import Adapters, Timm, Transform
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.training.network import Network, feature_start
from tests.methods.training_harness import tiny_context

#: The tensors of a stage of `Tiny`, a convolution and a batch norm; the last two are running statistics.
STAGE = ("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var")


def timm_start(name: str, side: int, **knobs) -> Trainable:
    split = image_split([0, 1], ArrayImages(np.zeros((2, side, side, 3), dtype=np.uint8)))
    return Timm(name, pretrained=False, **knobs).trainable(Dataset("made", split, split), seed=0)


def with_adapters() -> Trainable:
    return timm_start("test_vit", 160, adapters=Adapters(4), transform=Transform())


def grown(start: Trainable, sizes: list[int], seed: int = 5) -> Network:
    network = Network(start)
    network.grow(sizes, seed)
    return network


def tiny(sizes: list[int], seed: int = 5) -> Network:
    return grown(tiny_context().network, sizes, seed)


def stage_names(*stages: int) -> set[str]:
    return {f"body.stage{stage}.{name}" for stage in stages for name in STAGE}


def head_names(*heads: int) -> set[str]:
    return {f"heads.{head}.{name}" for head in heads for name in ("weight", "bias")}


def moved(network: Network, change) -> set[str]:
    """The entries of the state dict that `change` changes."""
    before = {name: value.clone() for name, value in network.state_dict().items()}
    change()
    return {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}


def sgd_step(network: Network) -> None:
    """All a training step can touch: parameters that require gradients, running statistics in train mode."""
    network.train()
    size = 160 if network.never_trains else 8
    images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    classes = network(images).shape[1]
    torch.nn.functional.cross_entropy(network(images), torch.arange(4) % classes).backward()
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    torch.optim.SGD(weights, lr=0.1, weight_decay=0.1).step()


def test_heads_depend_on_the_seed_and_the_task_not_on_how_they_came():
    at_once, one_by_one, other = tiny([2, 3, 1]), tiny([2]), tiny([2, 3, 1], seed=6)
    one_by_one.grow([2, 3], 5)
    one_by_one.grow([2, 3, 1], 5)
    one_by_one.grow([2, 3, 1], 5)
    for name in head_names(0, 1, 2):
        assert torch.equal(at_once.state_dict()[name], one_by_one.state_dict()[name])
    assert not any(torch.equal(at_once.heads[t].weight, other.heads[t].weight) for t in range(3))


def test_new_class_weights_fill_plus_minus_one_over_the_root_of_d():
    network = tiny([500, 500])
    for head in network.heads:
        values = head.weight.detach().numpy() * network.dimension**0.5
        assert values.min() >= -1
        assert values.max() < 1
        np.testing.assert_allclose(
            np.quantile(values, [0.01, 0.25, 0.5, 0.75, 0.99]), [-0.98, -0.5, 0, 0.5, 0.98], atol=0.05
        )
        assert not head.bias.any()
    assert not torch.equal(network.heads[0].weight, network.heads[1].weight)


def test_growing_leaves_torchs_generator_where_it_was():
    network = Network(tiny_context().network)
    before = torch.get_rng_state()
    network.grow([2, 3], 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_scores_are_the_heads_beside_each_other_in_order():
    network = tiny([2, 3]).eval()
    images = torch.randn(5, 3, 8, 8)
    features = network.body(images).detach()
    state = network.state_dict()
    W = torch.cat([state["heads.0.weight"], state["heads.1.weight"]])
    assert network(images).shape == (5, 5)
    torch.testing.assert_close(network(images), features @ W.T)
    assert torch.equal(network.logits(features), network(images))


def test_all_of_a_plain_network_changes_and_travels():
    network = tiny([2, 3])
    network.freeze(())
    names = stage_names(1, 2, 3, 4) | head_names(0, 1)
    assert set(network.changing()) == set(network.state()) == names
    counters = {f"body.stage{stage}.1.num_batches_tracked" for stage in (1, 2, 3, 4)}
    assert set(network.state_dict()) == names | counters
    assert moved(network, lambda: sgd_step(network)) == names | counters


def test_frozen_stages_and_heads_stay_and_nothing_else_does():
    network = tiny([2, 3])
    network.freeze(
        {f"body.{name}" for name in frozen_names(network.body, tiny_context().network.stages, 2)} | head_names(0)
    )
    changing = stage_names(3, 4) | head_names(1)
    assert set(network.changing()) == changing
    assert set(network.state()) == stage_names(1, 2, 3, 4) | head_names(0, 1)
    counters = {f"body.stage{stage}.1.num_batches_tracked" for stage in (3, 4)}
    assert moved(network, lambda: sgd_step(network)) == changing | counters


def test_a_batch_norm_whose_parameters_are_frozen_keeps_its_statistics_while_its_convolution_trains():
    network = tiny([2])
    network.freeze({"body.stage1.1.weight", "body.stage1.1.bias"})
    changing = {"body.stage1.0.weight"} | stage_names(2, 3, 4) | head_names(0)
    assert set(network.changing()) == changing
    assert {name for name in moved(network, lambda: sgd_step(network)) if "num_batches" not in name} == changing


def test_freezing_is_exactly_what_was_said_last():
    network = tiny([2, 3])
    network.freeze(head_names(0) | stage_names(1))
    network.freeze(head_names(1))
    assert set(network.changing()) == stage_names(1, 2, 3, 4) | head_names(0)
    network.freeze(())
    assert all(weight.requires_grad for weight in network.parameters())
    network.train()
    assert all(module.training for module in network.modules())


def test_evaluation_mode_is_whole():
    network = tiny([2])
    network.freeze(stage_names(1))
    network.train()
    network.eval()
    assert not any(module.training for module in network.modules())


def test_of_a_network_with_adapters_only_adapters_and_heads_change_and_travel():
    start = with_adapters()
    network = grown(start, [2, 3])
    network.freeze(())
    body = start.build()
    adapters = {f"body.{name}" for name, weight in body.named_parameters() if weight.requires_grad}
    assert adapters
    assert all(".mlp.down." in name or ".mlp.up." in name for name in adapters)
    assert set(network.changing()) == set(network.state()) == adapters | head_names(0, 1)
    # `up` starts at zero, so the gradient of `down` does too, and its bias is zero besides.
    assert moved(network, lambda: sgd_step(network)) >= {name for name in adapters if ".up." in name} | head_names(0, 1)
    assert moved(network, lambda: sgd_step(network)) == adapters | head_names(0, 1)


def test_heads_of_a_network_with_adapters_freeze_too():
    network = grown(with_adapters(), [2, 3])
    network.freeze(head_names(0))
    assert not set(network.changing()) & head_names(0)
    assert set(network.state()) >= head_names(0, 1)


def test_a_frozen_batch_norm_in_a_network_that_comes_with_frozen_parameters_does_not_travel():
    """As a batch norm under adapters would be: everyone has it from the start."""
    plain = tiny_context().network
    body = plain.build()
    body.stage1.requires_grad_(False)
    start = dataclasses.replace(plain, build=copies(body))
    network = grown(start, [2])
    network.freeze(())
    assert set(network.state()) == set(network.changing()) == stage_names(2, 3, 4) | head_names(0)
    assert not {name for name in moved(network, lambda: sgd_step_of_tiny(network)) if "stage1" in name}


def sgd_step_of_tiny(network: Network) -> None:
    network.train()
    network(torch.randn(4, 3, 8, 8)).square().sum().backward()
    torch.optim.SGD([weight for weight in network.parameters() if weight.requires_grad], lr=0.1).step()


@pytest.mark.parametrize("stem", ["own", "cifar"])
def test_a_resnet_freezes_with_its_stem(stem):
    start = timm_start("test_resnet", 32, stem=stem, transform=Transform(size=32, mean=[0.5] * 3, std=[0.5] * 3))
    network = grown(start, [2])
    network.freeze(f"body.{name}" for name in frozen_names(network.body, start.stages, 1))
    kept = [name for name in network.state() if name not in network.changing()]
    assert {name.split(".")[1] for name in kept} == {"conv1", "bn1", "layer1"}
    assert {"body.bn1.running_mean", "body.layer1.0.bn1.running_var"} <= set(kept)
    assert not {name.split(".")[1] for name in network.changing()} & {"conv1", "bn1", "layer1"}


def test_what_changes_is_all_that_one_network_needs_of_another():
    """With the same start, `state` makes two networks equal; after a step, `changing` does."""
    ours, theirs = tiny([2]).to(memory_format=torch.channels_last), tiny([2])
    for network in (ours, theirs):
        network.freeze(stage_names(1))
    sgd_step(ours)
    theirs.load(ours.changing())
    images = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(theirs.eval()(images), ours.eval()(images))
    for name, value in ours.state().items():
        assert torch.equal(value, theirs.state()[name]), name


def test_loading_keeps_the_layout_and_takes_other_types():
    network = tiny([2]).to(memory_format=torch.channels_last)
    values = {name: value.double().contiguous() for name, value in tiny([2], seed=9).state().items()}
    network.load(values)
    assert network.body.stage2[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(value, values[name].float()) for name, value in network.state().items())


def test_a_batch_norm_without_parameters_keeps_its_statistics_which_never_travel():
    body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4, affine=False), torch.nn.Flatten())
    start = Trainable("made", copies(body), 4 * 36, 8, (0.5,) * 3, (0.5,) * 3, (), {})
    network = grown(start, [2])
    network.freeze(())
    assert moved(network, lambda: sgd_step_of_tiny(network)) == set(network.changing())
    assert set(network.changing()) == {"body.0.weight", "body.0.bias"} | head_names(0)


def test_what_is_frozen_has_no_gradient_left():
    """A method that looks at gradients would take that of the last task for this one's."""
    network = Network(feature_start(3))
    network.grow([2, 2], 0)
    network(torch.ones(1, 3)).sum().backward()
    network.freeze(["heads.0.weight"])
    assert [name for name, own in network.named_parameters() if own.grad is None] == ["heads.0.weight"]


def by_walking(network: Network) -> dict[str, list[str]]:
    """What the network's own lists should name, found anew."""
    norms = [name for name, module in network.named_modules() if isinstance(module, torch.nn.BatchNorm2d)]
    known = network.never_trains
    return {
        "training_parameters": [name for name, own in network.named_parameters() if own.requires_grad],
        "state": [name for name, own in network.state_dict().items() if own.is_floating_point() and name not in known],
        "norms in training": [name for name in norms if network.get_submodule(name).weight.requires_grad],
    }


def told(network: Network) -> dict[str, list[str]]:
    """The same as the network says it, looking at the tensors that it has now."""
    network.train()
    own = network.state_dict()
    for name, value in {**network.changing(), **network.state()}.items():
        assert value.data_ptr() == own[name].data_ptr(), name
    norms = {name: module for name, module in network.named_modules() if isinstance(module, torch.nn.BatchNorm2d)}
    return {
        "training_parameters": list(network.training_parameters()),
        "state": list(network.state()),
        "norms in training": [name for name, module in norms.items() if module.training],
    }


def test_what_a_network_has_looked_up_is_found_anew_after_every_change():
    network = tiny([2])
    assert told(network) == by_walking(network)
    changes = [
        lambda: network.grow([2, 3], 5),
        lambda: network.freeze(stage_names(1) | head_names(0)),
        lambda: network.freeze(()),
        lambda: network.requires_grad_(False),
        lambda: network.to(torch.float64),
        lambda: network.keep_heads(1),
        lambda: network.put_body(tiny_context().network.build()),
        lambda: network.eval(),
    ]
    for change in changes:
        change()
        assert told(network) == by_walking(network)
        assert all(value.dtype == next(network.body.parameters()).dtype for value in network.state().values())


def test_a_copy_has_looked_up_its_own_tensors():
    network = tiny([2])
    before = {name: value.clone() for name, value in network.state().items()}
    twin = copy.deepcopy(network)
    assert told(twin) == by_walking(twin)
    twin.load({name: value + 1 for name, value in before.items()})
    assert all(torch.equal(value, before[name]) for name, value in network.state().items())
    assert all(torch.equal(value, before[name] + 1) for name, value in twin.state().items())


def test_only_known_names_are_loaded():
    network = tiny([2])
    network.load_known(
        {"heads.0.bias": torch.tensor([3.0, 4.0]), "heads.1.bias": torch.ones(2), "rate": torch.ones(())}
    )
    assert network.state()["heads.0.bias"].tolist() == [3, 4]
    with pytest.raises(KeyError):
        network.load({"heads.1.bias": torch.ones(2)})


def test_a_new_head_takes_nothing_from_everyones_generator():
    before = torch.get_rng_state()
    tiny([2, 0])
    assert torch.equal(torch.get_rng_state(), before)
