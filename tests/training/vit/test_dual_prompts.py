"""DualPrompt's prompts: which are chosen, what draws the keys, and the features under them against a naive ViT."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.transformers.dualprompt import DualPrompt, DualPrompts
from fcl_bench.methods.transformers.prompts import PromptedViT
from tests.training.vit.prompt_oracle import naive_cosine, naive_features
from tests.training.vit.test_prefix import vit

D = 16


def drawn(tasks: int = 3, dimension: int = D, **knobs) -> DualPrompts:
    made = DualPrompts(DualPrompt(**{"e_layers": [2, 3], "e_length": 4, **knobs}), dimension)
    for task in range(tasks):
        made.grow(task)
    return made


def test_each_layer_takes_the_prompt_whose_key_is_nearest():
    """Keys are unit vectors: a query e_3 takes prompt 3 (from 1) in every layer whose keys say so."""
    prompts, queries = drawn(4).eval(), torch.eye(D)[[2, 0, 3]]
    with torch.no_grad():
        for task, keys in enumerate(prompts.K):
            keys.copy_(torch.eye(D)[[task, task]])
    assert prompts.chosen(5 * queries).tolist() == [[2, 2], [0, 0], [3, 3]]
    found = prompts(queries)
    for i, layer in enumerate((2, 3)):
        assert torch.equal(found[layer], torch.stack([prompts.E[task][i] for task in (2, 0, 3)]))
    with torch.no_grad():
        prompts.K[1][1].copy_(torch.eye(D)[2] * 3)
        prompts.K[2][1].copy_(torch.eye(D)[1])
    found = prompts(queries)
    assert torch.equal(found[2][0], prompts.E[2][0])
    assert torch.equal(found[3][0], prompts.E[1][1])


def test_the_length_of_keys_and_queries_does_not_count():
    torch.manual_seed(0)
    prompts, queries = drawn(), torch.randn(9, D)
    chosen = prompts.chosen(queries)
    for task, keys in enumerate(prompts.K):
        keys.data *= 10.0**task
    assert torch.equal(prompts.chosen(1e-3 * queries), chosen)
    assert len(chosen.unique()) > 1


def test_training_takes_the_last_tasks_prompt_whatever_its_key():
    prompts, queries = drawn(3), torch.randn(5, D)
    prompts.K[0].data.copy_(queries[:2])
    found = prompts.train()(queries)
    assert {layer: value.shape for layer, value in found.items()} == {
        **dict.fromkeys((0, 1), (1, 6, D)),
        **dict.fromkeys((2, 3), (1, 4, D)),
    }
    for i, layer in enumerate((2, 3)):
        assert torch.equal(found[layer][0], prompts.E[2][i])
    general = prompts.eval()(queries)
    assert all(torch.equal(general[layer][0], prompts.G[layer]) for layer in (0, 1))


def test_the_penalty_is_that_of_the_equation():
    torch.manual_seed(0)
    prompts, queries = drawn(pull=0.7).train(), torch.randn(5, D)
    prompts(queries)
    each = [[1 - naive_cosine(q, k.detach()) for k in prompts.K[-1]] for q in queries]
    assert prompts.penalty.item() == pytest.approx(0.7 * np.sum(each), abs=1e-5)
    prompts.penalty.backward()
    assert prompts.K[-1].grad is not None
    assert all(keys.grad is None for keys in prompts.K[:-1])
    # Nothing is drawn in a test.
    prompts.eval()(queries)
    assert prompts.penalty.item() == 0


def test_a_key_along_the_query_costs_nothing_and_feels_nothing():
    torch.manual_seed(0)
    prompts, query = drawn().double().train(), torch.randn(1, D, dtype=torch.float64)
    prompts.K[-1].data.copy_(torch.cat([3 * query, 0.1 * query]))
    prompts(query.expand(4, D))
    assert prompts.penalty.item() == pytest.approx(0, abs=1e-14)
    prompts.penalty.backward()
    assert float(prompts.K[-1].grad.abs().max()) < 1e-14
    prompts.K[-1].data.copy_(torch.cat([-query, query]))
    prompts(query)
    assert prompts.penalty.item() == pytest.approx(2)


def test_without_pull_keys_get_no_gradient():
    prompts = drawn(pull=0.0).train()
    found = prompts(torch.randn(5, D))
    assert not prompts.penalty.requires_grad
    sum(value.sum() for value in found.values()).backward()
    assert prompts.K[-1].grad is None
    assert prompts.E[-1].grad is not None
    assert prompts.E[0].grad is None


@pytest.mark.parametrize("training", [True, False])
def test_the_features_are_those_of_a_naive_vit(training):
    torch.manual_seed(0)
    prompts, images = drawn(), torch.randn(4, 3, 8, 8)
    plain = vit()
    queries = naive_features(plain, images, {}).detach()
    with torch.no_grad():
        # Other prompts for other images.
        prompts.K[0].copy_(torch.stack([queries[0], queries[1]]))
        prompts.K[1].copy_(torch.stack([queries[2], queries[0]]))
    nearest = [
        [int(np.argmax([naive_cosine(q, keys[i].detach()) for keys in prompts.K])) for i in (0, 1)] for q in queries
    ]
    assert len({tuple(tasks) for tasks in nearest}) > 1
    expected = {layer: prompts.G[layer].double().expand(4, 6, D) for layer in (0, 1)}
    for i, layer in enumerate((2, 3)):
        tasks = [2] * 4 if training else [tasks[i] for tasks in nearest]
        expected[layer] = torch.stack([prompts.E[task][i] for task in tasks]).double()
    wanted = naive_features(plain, images, expected)
    found = PromptedViT(plain, prompts).train(training)(images)
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(wanted.float(), queries.float(), atol=1e-3)


def test_keys_far_from_every_query_and_zero_values_leave_the_vit_as_it_was():
    """Queries of the attention are shifted along one direction, against which all prompts' keys lie."""
    torch.manual_seed(0)
    plain, images = vit(), torch.randn(3, 3, 8, 8)
    for block in plain.blocks:
        block.attn.qkv.bias.data[:D] = 5.0
    expected = plain(images)
    prompts = drawn()
    for rows in [prompts.G, *prompts.E]:
        half = rows.shape[1] // 2
        rows.data[:, :half], rows.data[:, half:] = -1e4, 0.0
    body = PromptedViT(plain, prompts)
    for training in (True, False):
        torch.testing.assert_close(body.train(training)(images), expected, atol=1e-5, rtol=1e-5)
    prompts.G.data[:, -1] = 5.0
    prompts.G.data[:, :3] = 1.0
    assert not torch.allclose(body(images), expected, atol=1e-2)


@pytest.mark.parametrize("training", [True, False])
def test_the_general_prompt_is_everyones(training):
    torch.manual_seed(0)
    body, images = PromptedViT(vit(), drawn()).train(training), torch.randn(6, 3, 8, 8)
    before = body(images)
    body.prompts.G.data[1, 0] += 1
    assert bool(((body(images) - before).abs().amax(dim=1) > 1e-5).all())


def test_numbers_that_train_and_travel_at_full_size():
    """At d = 768, for a task of ten classes: 65,290 floats in each round, 261 KB."""
    prompts = drawn(2, 768, e_layers=[2, 3, 4], e_length=20)
    old = prompts.old()
    assert old == {"E.0", "K.0"}
    training = {name: value.numel() for name, value in prompts.named_parameters() if name not in old}
    assert training == {"G": 2 * 6 * 768, "E.1": 3 * 20 * 768, "K.1": 3 * 768}
    assert sum(training.values()) + 10 * 769 == 65_290


def test_draws_follow_from_the_seed_and_lie_in_the_unit_interval():
    first, again = drawn(), drawn()
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert 0 <= float(value.min()) < 0.2
        assert 0.8 < float(value.max()) <= 1
    assert not torch.equal(first.E[0], first.E[1])
    assert not torch.equal(first.K[0], first.K[1])


def test_autocast_changes_neither_the_choice_nor_the_penalty():
    torch.manual_seed(0)
    prompts, queries = drawn(6), torch.randn(50, D)
    exact = prompts.chosen(queries)
    prompts.train()(queries)
    penalty = prompts.penalty
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(prompts.chosen(queries), exact)
        prompts(queries)
    assert torch.equal(prompts.penalty, penalty)


def test_no_rows_are_no_prompt():
    none = drawn(g_length=0, e_length=0)
    assert none.layers == ()
    assert list(none.parameters()) == []
    assert dict(none.train()(torch.randn(2, D))) == {}
    assert dict(none.eval()(torch.randn(2, D))) == {}
    assert none.tasks == 3
    assert drawn(g_length=0).layers == (2, 3)
    assert [name for name, _ in drawn(e_length=0).named_parameters()] == ["G"]
