"""CODA-Prompt's components: weights and mixtures against loops, orthogonal groups, the penalty, and the limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.transformers.coda_prompt import (
    CodaPrompt,
    CodaPrompts,
    Components,
    group_name,
    orthonormal_rows,
    unlike_orthonormal,
)

LAYERS = (0, 2)


def made(components: int, dimension: int = 12, softmax: bool = False, **options) -> CodaPrompts:
    method = CodaPrompt(layers=list(LAYERS), components=components, length=4, **options)
    method.softmax = softmax
    return CodaPrompts(method, dimension)


def grown(tasks: int = 2, components: int = 3, dimension: int = 12, seed: int = 0, **options) -> CodaPrompts:
    """Groups as they are after training: no longer orthonormal."""
    prompts = made(components, dimension, **options)
    generator = torch.Generator().manual_seed(seed)
    for task in range(tasks):
        prompts.grow(seed + task)
        with torch.no_grad():
            for value in prompts.parameters():
                value += 0.3 * torch.randn(value.shape, generator=generator)
    return prompts.double()


def queries(count: int = 5, dimension: int = 12) -> torch.Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def by_loops(q: np.ndarray, A: np.ndarray, K: np.ndarray, P: np.ndarray, softmax: bool) -> np.ndarray:
    """sum_m cos(q * A_m, K_m) P_m, image by image and component by component."""
    out = np.zeros((len(q), *P.shape[1:]))
    for i in range(len(q)):
        for m in range(len(A)):
            attention = np.exp(A[m]) / np.exp(A[m]).sum() if softmax else A[m]
            seen = q[i] * attention
            out[i] += seen @ K[m] / np.linalg.norm(seen) / np.linalg.norm(K[m]) * P[m]
    return out


# Weights and mixtures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", [False, True])
def test_the_prompt_is_the_weighted_sum_of_all_tasks_components(softmax):
    prompts, q = grown(tasks=3, softmax=softmax), queries()
    found = prompts.eval()(q)
    assert list(found) == list(LAYERS)
    for layer, prompt in found.items():
        groups = [
            np.concatenate([group[group_name(layer, task)].detach().numpy() for task in range(3)])
            for group in (prompts.A, prompts.K, prompts.P)
        ]
        np.testing.assert_allclose(prompt.detach().numpy(), by_loops(q.numpy(), *groups, softmax), atol=1e-12)
    # Training mixes the same components.
    assert all(torch.equal(prompt, found[layer]) for layer, prompt in prompts.train()(q).items())


def test_one_component_that_asks_for_just_this_query_is_the_prompt():
    q = queries(1)
    P = torch.randn(1, 4, 12, dtype=torch.float64)
    prompts, one = made(1), Components(torch.ones(1, 12, dtype=torch.float64), q, P)
    torch.testing.assert_close(prompts.weights(q, one), torch.ones(1, 1, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(prompts.mixed(q, one), P, atol=1e-12, rtol=0)
    # And the opposite query gets the opposite prompt.
    torch.testing.assert_close(prompts.mixed(-q, one), -P, atol=1e-12, rtol=0)


def test_weights_do_not_know_lengths():
    prompts, q = grown(), queries()
    own = prompts.of(0)
    expected = prompts.weights(q, own)
    assert float(expected.detach().abs().max()) <= 1
    longer = Components(own.A * torch.rand(6, 1).double().add(0.1), own.K * 7, own.P)
    torch.testing.assert_close(prompts.weights(5 * q, longer), expected, atol=1e-12, rtol=0)


def test_the_order_of_components_does_not_matter():
    prompts, q = grown(), queries()
    own, order = prompts.of(2), torch.tensor([4, 0, 5, 1, 3, 2])
    torch.testing.assert_close(
        prompts.mixed(q, Components(*(tensor[order] for tensor in own))), prompts.mixed(q, own), atol=1e-12, rtol=0
    )


def test_a_query_that_attention_blots_out_has_weight_0_and_finite_gradients():
    prompts, q = grown(tasks=1), torch.zeros(2, 12, dtype=torch.float64)
    q[1, 3] = 1.0
    mixed = prompts(q)[0]
    assert not mixed[0].any()
    assert mixed[1].any()
    mixed.sum().backward()
    assert all(bool(torch.isfinite(value.grad).all()) for name, value in prompts.named_parameters() if ".0_" in name)


def test_weights_are_exact_under_autocast():
    """Cosines in bfloat16 would be off by a hundredth."""
    prompts, q = grown().float(), queries().float()
    expected = prompts(q)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(prompts(q.bfloat16().float())[0], prompts.mixed(q.bfloat16(), prompts.of(0)))
        assert torch.equal(prompts(q)[0], expected)


# Groups ---------------------------------------------------------------------------------------------------------------


def test_a_new_group_is_orthonormal_and_orthogonal_to_all_trained_ones():
    prompts = grown(tasks=2, components=3).float()
    before = {name: value.clone() for name, value in prompts.named_parameters()}
    prompts.grow(5)
    assert prompts.tasks == 3
    for layer in LAYERS:
        for group in (prompts.A, prompts.K, prompts.P):
            new = group[group_name(layer, 2)].detach().flatten(1)
            old = torch.cat([group[group_name(layer, task)].detach().flatten(1) for task in (0, 1)])
            # The old ones are not orthogonal to each other, so that one projection after the other would not do.
            assert float((old @ old.T - torch.eye(6)).abs().max()) > 0.1
            assert float((new @ old.T).abs().max()) < 1e-5
            assert float((new @ new.T - torch.eye(3)).abs().max()) < 1e-5
    assert all(torch.equal(dict(prompts.named_parameters())[name], value) for name, value in before.items())


def test_where_no_orthogonal_direction_is_left_components_are_random_ones_of_length_1():
    """8 dimensions, of which 6 are taken: two rows of four fit."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(6, 8, generator=generator)
    new = orthonormal_rows(4, 8, old, generator)
    assert float((new[:2] @ old.double().T).abs().max()) < 1e-10
    assert float((new[2:] @ old.double().T).abs().max()) > 1e-2
    torch.testing.assert_close(new.norm(dim=1), torch.ones(4, dtype=torch.float64), atol=1e-12, rtol=0)
    full = orthonormal_rows(3, 8, torch.randn(20, 8, generator=generator), generator)
    torch.testing.assert_close(full.norm(dim=1), torch.ones(3, dtype=torch.float64), atol=1e-12, rtol=0)
    # Rows that say the same thing twice take one dimension only.
    again = orthonormal_rows(4, 8, old[:4].repeat(2, 1), generator)
    assert float((again @ old[:4].double().T).abs().max()) < 1e-10


def test_groups_follow_from_the_seed_and_differ_between_layers():
    one, two, other = made(3), made(3), made(3)
    for prompts, seed in ((one, 1), (two, 1), (other, 2)):
        prompts.grow(seed)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.K[group_name(0, 0)], one.K[group_name(2, 0)])
    assert not torch.equal(one.K[group_name(0, 0)], one.A[group_name(0, 0)])


def test_all_but_the_last_group_are_old():
    prompts = grown(tasks=3)
    names = {name for name, _ in prompts.named_parameters()}
    assert prompts.old() == {name for name in names if not name.endswith("_2")}
    assert grown(tasks=1).old() == set()
    # A task of the paper's setting, five layers of ten components: all that is sent but the head of ten classes.
    paper = CodaPrompts(CodaPrompt(), 768)
    paper.grow(0)
    assert sum(value.numel() for value in paper.parameters()) + 10 * 769 == 391_690


# The penalty ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, 0, 0], [0, 0, -1]], 0.0),
        ([[2, 0, 0]], 9.0),
        ([[0, 1, 0], [0, 1, 0]], 0.5),
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], 1 / 3),
    ],
)
def test_the_penalty_by_hand(rows, expected):
    assert unlike_orthonormal(torch.tensor(rows).double()).item() == pytest.approx(expected, abs=1e-15)


def test_the_penalty_is_of_all_groups_and_layers_and_of_training_alone():
    prompts, q = grown(tasks=2, orthogonality=0.7), queries()
    expected = 0.0
    for layer in LAYERS:
        for group in (prompts.A, prompts.K, prompts.P):
            X = np.concatenate([group[group_name(layer, t)].detach().numpy().reshape(3, -1) for t in (0, 1)])
            expected += np.square(X @ X.T - np.eye(6)).mean()
    prompts.train()(q)
    assert prompts.penalty.item() == pytest.approx(0.7 * expected, rel=1e-12)
    prompts.eval()(q)
    assert prompts.penalty.item() == 0
    without = grown(tasks=2)
    without.train()(q)
    assert without.penalty.item() == 0
    assert not without.penalty.requires_grad
