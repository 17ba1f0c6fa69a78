"""Low-rank updates of frozen layers: their limits, and their sum."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.low_rank import LowRank, add_low_rank
from tests.training.vit.test_prefix import vit


def drawn(layer: LowRank, tasks: int, rank: int) -> LowRank:
    generator = torch.Generator().manual_seed(1)
    for _ in range(tasks):
        layer.grow(rank, generator)
    for factor in layer.B.values():
        factor.data = torch.randn(factor.shape, generator=generator)
    return layer


def test_a_new_update_leaves_the_network_as_it_was():
    torch.manual_seed(0)
    plain, images = vit(), torch.randn(2, 3, 8, 8)
    expected = plain(images)
    add_low_rank(list(plain.blocks), ["q", "v", "proj", "fc1", "fc2"], [0, 2])
    found = {name: module for name, module in plain.blocks.named_modules() if isinstance(module, LowRank)}
    assert sorted(found) == [
        f"{layer}.{name}" for layer in (0, 2) for name in ("attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2")
    ]
    for layer in found.values():
        layer.grow(2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(images), expected, atol=1e-6, rtol=1e-6)


def test_the_updates_are_those_of_the_effective_weights():
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(5, 12), torch.randn(7, 5)
    layer = drawn(LowRank(linear, {"q": (0, 4), "v": (8, 12)}), 2, 3)
    layer.scales = {1: 0.5}
    weight = linear.weight.clone()
    weight[:4] += layer.delta("q", 0) + 0.5 * layer.delta("q", 1)
    weight[8:] += layer.delta("v", 0) + 0.5 * layer.delta("v", 1)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, linear.bias), atol=1e-5, rtol=1e-5)
    layer.scales = {0: 0.0, 1: 0.0}
    assert torch.equal(layer(x), linear(x))


def test_the_sum_of_updates_is_the_concatenated_one():
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(5, 6), torch.randn(7, 5)
    several = drawn(LowRank(linear, {"all": (0, 6)}), 3, 2)
    one = drawn(LowRank(linear, {"all": (0, 6)}), 1, 6)
    one.A["all_0"].data = torch.cat(list(several.A.values())).detach()
    one.B["all_0"].data = torch.cat(list(several.B.values()), dim=1).detach()
    torch.testing.assert_close(several(x), one(x), atol=1e-6, rtol=1e-6)


def test_one_task_acts_alone_or_all_in_the_mean_or_what_was_merged():
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(5, 12), torch.randn(7, 5)
    layer = drawn(LowRank(linear, {"q": (0, 4), "v": (8, 12)}), 2, 3)

    def under(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        update = torch.cat([q, torch.zeros(4, 5), v])
        return torch.nn.functional.linear(x, linear.weight + update, linear.bias)

    deltas = [(layer.delta("q", task), layer.delta("v", task)) for task in (0, 1)]
    for task in (0, 1):
        layer.act(task)
        torch.testing.assert_close(layer(x), under(*deltas[task]), atol=1e-5, rtol=1e-5)
    layer.act()
    mean = [(first + second) / 2 for first, second in zip(*deltas, strict=True)]
    torch.testing.assert_close(layer(x), under(*mean), atol=1e-5, rtol=1e-5)
    layer.merged = {"q": torch.randn(4, 5), "v": torch.randn(4, 5)}
    torch.testing.assert_close(layer(x), under(layer.merged["q"], layer.merged["v"]), atol=1e-5, rtol=1e-5)


def test_wrong_targets_are_refused_in_a_line():
    blocks = list(vit().blocks)
    with pytest.raises(UserError, match="w is no linear layer of a block"):
        add_low_rank(blocks, ["w"], [0])
    for twice in (["q", "q"], ["q", "qkv"]):
        with pytest.raises(UserError, match="names a layer twice"):
            add_low_rank(blocks, twice, [0])
