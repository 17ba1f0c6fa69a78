"""L2P's pool: which prompts an image takes, in which order their rows stand, and what draws the keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.environment import computing
from fcl_bench.methods.transformers.l2p import L2P, PromptPool
from fcl_bench.methods.transformers.prompts import PromptedViT
from tests.training.vit.prompt_oracle import naive_cosine, naive_features
from tests.training.vit.test_prefix import vit

D = 16


def drawn(tasks: int = 1, dimension: int = D, **knobs) -> PromptPool:
    made = PromptPool(L2P(**{"pool": 6, "length": 4, "top": 2, **knobs}), dimension)
    for task in range(tasks):
        made.grow(task)
    return made


def nearest(pool: PromptPool, queries: torch.Tensor, layer: int = 0) -> list[list[int]]:
    """The `top` prompts of each query, the nearest first."""
    keys = pool.K[layer].detach()
    found = np.array([[naive_cosine(q, k) for k in keys] for q in queries])
    return np.argsort(-found, axis=1)[:, : pool._method.top].tolist()


def penalty(pool: PromptPool, queries: torch.Tensor, crossed: bool = False) -> float:
    """Summed over images, in loops; crossed: of every image, the keys that any image has chosen."""
    total = 0.0
    for layer in range(len(pool.layers)):
        chosen = nearest(pool, queries, layer)
        for i, query in enumerate(queries):
            for j in range(len(queries)) if crossed else [i]:
                total += sum(1 - naive_cosine(query, pool.K[layer][m].detach()) for m in chosen[j])
    return total


@pytest.mark.parametrize("layers", [[0], [0, 2, 3]], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_an_image_takes_the_nearest_prompts_all_keys_before_all_values(training, layers):
    torch.manual_seed(0)
    pool, queries = drawn(layers=layers).train(training), torch.randn(7, D)
    found = pool(queries)
    assert list(found) == layers
    for i, layer in enumerate(layers):
        chosen = nearest(pool, queries, i)
        assert len({tuple(rows) for rows in chosen}) > 1
        wanted = [torch.cat([*(pool.P[i, m, :2] for m in rows), *(pool.P[i, m, 2:] for m in rows)]) for rows in chosen]
        assert torch.equal(found[layer], torch.stack(wanted))


def test_several_threads_always_find_the_same_gradient():
    """They added what images of one prompt give to it in any order, so that no two runs had the same bits."""
    torch.manual_seed(0)
    pool, queries = drawn(dimension=512, top=5, length=20), torch.randn(64, 512)
    with computing(2):
        found = []
        for _ in range(10):
            pool.zero_grad()
            [prompts] = pool(queries).values()
            (prompts * torch.linspace(-1, 1, prompts.numel()).view_as(prompts)).sum().backward()
            found.append(pool.P.grad.clone())
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.slow_cases("[1]")
@pytest.mark.parametrize("layers", [[1], [1, 3]], ids=str)
def test_the_features_are_those_of_a_naive_vit(layers):
    torch.manual_seed(0)
    plain, images, pool = vit(), torch.randn(3, 3, 8, 8), drawn(layers=layers)
    queries = naive_features(plain, images, {})
    pool.K.data[:, :3] = queries.detach().float()
    rows = {}
    for i, layer in enumerate(layers):
        chosen = nearest(pool, queries.detach(), i)
        rows[layer] = torch.stack([torch.cat([pool.P[i, m, part] for part in (slice(2), slice(2, 4)) for m in ms])
                                   for ms in chosen]).double()  # fmt: skip
    wanted = naive_features(plain, images, rows)
    torch.testing.assert_close(PromptedViT(plain, pool)(images).double(), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["working", "published"])
def test_the_penalty_is_of_each_images_own_keys_or_as_published_of_everyones(variant):
    torch.manual_seed(0)
    pool, queries = drawn(layers=[0, 1], pull=0.5, variant=variant).train(), torch.randn(5, D)
    pool(queries)
    assert pool.penalty.item() == pytest.approx(0.5 * penalty(pool, queries, variant == "published"), rel=1e-5)
    # Five times as many terms, of which one in five is the right one.
    assert penalty(pool, queries, True) > 3 * penalty(pool, queries)
    pool.eval()(queries)
    assert pool.penalty.item() == 0


def test_keys_that_nobody_chose_feel_nothing_and_the_pull_is_the_chosen_ones_alone():
    torch.manual_seed(0)
    pool, queries = drawn().train(), torch.randn(2, D)
    [found] = pool(queries).values()
    (found.sum() + pool.penalty).backward()
    chosen = sorted({m for rows in nearest(pool, queries) for m in rows})
    assert len(chosen) < 6
    for values in (pool.K.grad[0], pool.P.grad[0].flatten(1)):
        assert values.abs().sum(dim=1).nonzero().flatten().tolist() == chosen


def test_a_chosen_key_along_the_query_costs_nothing():
    torch.manual_seed(0)
    pool, query = drawn(top=1).double().train(), torch.randn(1, D, dtype=torch.float64)
    pool.K.data[0, 4] = 7 * query[0]
    assert nearest(pool, query) == [[4]]
    pool(query)
    pool.penalty.backward()
    assert pool.penalty.item() == pytest.approx(0, abs=1e-14)
    assert float(pool.K.grad.abs().max()) < 1e-14


def test_the_order_of_the_pool_does_not_count():
    torch.manual_seed(0)
    images, pool, other = torch.randn(4, 3, 8, 8), drawn(top=3), drawn(top=3)
    order = torch.randperm(6)
    other.P.data, other.K.data = pool.P.data[:, order], pool.K.data[:, order]
    plain = vit()
    found = PromptedViT(plain, pool)(images)
    torch.manual_seed(0)
    torch.testing.assert_close(PromptedViT(vit_like(plain), other)(images), found)
    assert not torch.equal(order, torch.arange(6))


def vit_like(wrapped):
    """The ViT without what `PromptedViT` put into it."""
    for block in wrapped.blocks:
        block.attn = getattr(block.attn, "attention", block.attn)
    return wrapped


def test_numbers_that_train_and_travel_at_full_size():
    """At d = 768 the whole pool trains in every task: 483,840 floats in each round, 1.9 MB; deep, five times that."""
    pool = drawn(4, 768, pool=30, length=20, top=5)
    assert pool.old() == set()
    assert sum(value.numel() for value in pool.parameters()) == 30 * (20 * 768 + 768) == 483_840
    deep = drawn(4, 768, layers=[0, 1, 2, 3, 4], pool=30, length=20, top=5)
    assert sum(value.numel() for value in deep.parameters()) == 5 * 483_840


def test_the_pool_is_drawn_once_by_the_first_seed():
    first, later = drawn(1), drawn(5)
    for name, value in first.state_dict().items():
        assert torch.equal(value, later.state_dict()[name])
        assert 0 <= float(value.min()) < 0.1
        assert 0.9 < float(value.max()) <= 1
    assert later.tasks == 5
    none = drawn(length=0)
    assert none.layers == ()
    assert list(none.parameters()) == []
    assert dict(none(torch.randn(2, D))) == {}
