"""Prompts inside a ViT's attention, against a naive loop, and their limits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.low_rank import dimension_of, require_layers, transformer_blocks
from fcl_bench.methods.transformers.prompts import PrefixAttention, PromptedViT, Prompts
from tests.methods.training_harness import tiny_context


def vit(size: int = 8, width: int = 2):
    network = tiny_context(size, width, architecture="vit").network
    assert network is not None
    return network.build().eval()


def naive_attention(attention, x, prefix):
    """(b, N, d) by loops over images, heads and tokens, in float64."""
    wide = attention.double()
    batch, tokens, d = x.shape
    each = d // wide.num_heads
    out = torch.zeros(batch, tokens, d, dtype=torch.float64)
    for i in range(batch):
        query, key, value = wide.qkv(x[i].double()).split(d, dim=1)
        rows = len(prefix[i]) // 2
        key, value = torch.cat([prefix[i][:rows].double(), key]), torch.cat([prefix[i][rows:].double(), value])
        for head in range(wide.num_heads):
            own = slice(head * each, (head + 1) * each)
            for token in range(tokens):
                weights = torch.softmax(key[:, own] @ query[token, own] / each**0.5, dim=0)
                out[i, token, own] = weights @ value[:, own]
    return wide.proj(out)


@pytest.mark.parametrize("shared", [False, True])
def test_prefix_attention_is_attention_with_further_keys_and_values(shared):
    torch.manual_seed(0)
    attention = vit(width=4).blocks[0].attn
    x, prefix = torch.randn(2, 4, 32), torch.randn(1 if shared else 2, 6, 32)
    wrapped = PrefixAttention(attention)
    wrapped.prefix = prefix
    found = wrapped(x).double()
    assert found.shape == x.shape
    torch.testing.assert_close(found, naive_attention(attention, x, prefix.expand(2, -1, -1)), atol=1e-6, rtol=1e-5)


def test_no_prefix_is_the_attention_as_it_was():
    torch.manual_seed(0)
    attention, x = vit().blocks[0].attn, torch.randn(2, 5, 16)
    assert torch.equal(PrefixAttention(attention)(x), attention(x))


def test_zero_values_under_keys_far_from_every_query_change_nothing():
    """The limit in which the prompt's share of attention goes to zero."""
    torch.manual_seed(0)
    attention = vit().blocks[0].attn
    # One token, so that a key against all of its queries can be had in every head.
    x = torch.randn(3, 1, 16)
    query = attention.qkv(x)[..., :16]
    wrapped = PrefixAttention(attention)
    wrapped.prefix = torch.cat([-1e6 * torch.sign(query), torch.zeros(3, 1, 16)], dim=1).detach()
    torch.testing.assert_close(wrapped(x), attention(x), atol=1e-6, rtol=1e-6)


class _Constant(Prompts):
    layers = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(1, 4, 16))

    def grow(self, seed: int) -> None:
        self.tasks += 1

    def forward(self, queries: torch.Tensor) -> Mapping[int, torch.Tensor]:
        self.seen = queries
        return {1: self.rows}

    def old(self) -> set[str]:
        return set()


def test_a_prompted_vit_trains_its_prompts_alone_and_asks_with_the_plain_features():
    torch.manual_seed(0)
    plain, images = vit(), torch.randn(3, 3, 8, 8)
    expected = plain(images)
    body = PromptedViT(plain, _Constant()).train()
    found = body(images)
    assert torch.equal(body.prompts.seen, expected)
    assert not body.prompts.seen.requires_grad
    assert not torch.allclose(found, expected)
    found.sum().backward()
    assert {name for name, value in body.named_parameters() if value.grad is not None} == {"prompts.rows"}
    assert not body.vit.training
    # Without a prompt it is the plain network again.
    assert torch.equal(body.queries(images), expected)


def test_expected_queries_are_used_once():
    torch.manual_seed(0)
    body, images, said = PromptedViT(vit(), _Constant()), torch.randn(3, 3, 8, 8), torch.zeros(3, 16)
    body.expect(said)
    body(images)
    assert body.prompts.seen is said
    body(images)
    assert torch.equal(body.prompts.seen, body.queries(images))


def test_what_is_no_vision_transformer_is_refused_in_a_line():
    conv = tiny_context().network
    assert conv is not None
    with pytest.raises(UserError, match="method=l2p works inside a vision transformer, and tiny is none"):
        transformer_blocks(conv.build(), "l2p", "tiny")
    assert [dimension_of(block) for block in transformer_blocks(vit(), "l2p", "tiny")] == [16] * 4
    for layers in ([], [0, 0], [4], [-1]):
        with pytest.raises(UserError, match="distinct numbers from 0 to 3"):
            require_layers("method.layers", layers, 4)
