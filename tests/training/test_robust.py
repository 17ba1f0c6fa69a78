"""Median, trimmed mean and Krum against plain NumPy, on cases made by hand, and what hostile models do to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.methods.gradient.robust import combined, krum, median, trimmed_mean

SHAPES = {"weight": (3, 2), "bias": (4,), "scalar": ()}


def models_of(rng: np.random.Generator, count: int) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.tensor(rng.standard_normal(shape)) for name, shape in SHAPES.items()} for _ in range(count)]


def flat(model: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([model[name].double().numpy().reshape(-1) for name in SHAPES])


def plain_krum(rows: np.ndarray, f: int) -> int:
    """Blanchard et al. (2017), Section 4, as a loop: the score of i sums over its n - f - 2 nearest."""
    n, scores = len(rows), []
    for i in range(n):
        others = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(others[: max(n - f - 2, 1)]))
    return scores.index(min(scores))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.floats(0, 0.49), st.integers(0, 3))
def test_they_are_what_plain_numpy_makes_of_the_same_models(seed, count, share, f):
    models = models_of(np.random.default_rng(seed), count)
    rows = np.stack([flat(model) for model in models])
    assert np.allclose(flat(median(models)), np.median(rows, axis=0), rtol=0, atol=1e-12)
    cut = int(np.floor(np.round(share * count, 9)))
    kept = np.sort(rows, axis=0)[cut : count - cut]
    assert np.allclose(flat(trimmed_mean(models, share)), kept.mean(axis=0), rtol=0, atol=1e-12)
    assert krum(models, f) == plain_krum(rows, f)


def column(*values: float) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor([value])} for value in values]


def test_cases_made_by_hand():
    assert float(median(column(1, 9, 2))["w"]) == 2
    assert float(median(column(1, 9, 2, 4))["w"]) == 3
    # 0.3 of ten are three at either end, though 0.3 * 10 is rounded.
    assert float(trimmed_mean(column(*range(9), 1e6), 0.3)["w"]) == 4.5
    assert float(trimmed_mean(column(-1e6, 0, 1, 2, 1e6), 0.2)["w"]) == 1
    assert float(trimmed_mean(column(3, 5), 0.0)["w"]) == 4
    # Of 0, 1, 2 and two colluding far away, the middle one is nearest to its two nearest (5 - 1 - 2 = 2).
    assert krum(column(0, 1, 2, 50, 50), 1) == 1
    # The colluding win where Krum is told that nobody is hostile... and there are more of them than of others.
    assert krum(column(0, 1, 50, 50, 50), 0) == 2
    assert krum(column(7), 1) == 0
    # Statistics lie anywhere: by the weights, the last one is the odd one out.
    weights, statistics = (0, 0.1, 0.2, 0.1, 9), (30, -30, 200, -200, 0)
    models = [{"w": torch.tensor([w]), "mean": torch.tensor([m])} for w, m in zip(weights, statistics, strict=True)]
    assert krum(models, 1) == 4
    assert krum(models, 1, {"mean"}) in (1, 3)


@pytest.mark.parametrize("kind", ["median", "trimmed_mean", "krum"])
@pytest.mark.parametrize("hostile", [1e6, -1e6, 1e30])
def test_a_hostile_minority_moves_them_no_further_than_the_honest_ones_reach(kind, hostile):
    honest = models_of(np.random.default_rng(1), 7)
    bad = [{name: torch.full(shape, hostile, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in range(2)]
    found = flat(combined([bad[0], *honest, bad[1]], kind, 0.25, 2))
    rows = np.stack([flat(model) for model in honest])
    assert (rows.min(axis=0) - 1e-6 <= found).all()
    assert (found <= rows.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize("kind", ["median", "trimmed_mean", "krum"])
def test_of_equal_models_each_is_that_model_and_the_order_of_others_does_not_matter(kind):
    [one] = models_of(np.random.default_rng(2), 1)
    assert np.array_equal(flat(combined([one] * 5, kind, 0.2, 1)), flat({k: v.float() for k, v in one.items()}))
    models = models_of(np.random.default_rng(3), 6)
    again = [models[place] for place in (3, 1, 5, 0, 2, 4)]
    assert np.allclose(flat(combined(models, kind, 0.2, 1)), flat(combined(again, kind, 0.2, 1)), atol=1e-7)
