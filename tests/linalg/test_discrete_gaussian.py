"""The discrete Gaussian's sampler against its exact law: the table, the acceptance, the whole."""

from __future__ import annotations

import hashlib
import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from fcl_bench.linalg import discrete_gaussian as sampler
from fcl_bench.linalg.discrete_gaussian import SCALE, discrete_gaussian


def words(seed: int = 0) -> sampler.Words:
    """Uniform numbers of 64 bits from an extendable hash, which is no generator of this project."""
    place = iter(range(10**6))

    def drawn(count: int) -> np.ndarray:
        text = hashlib.shake_128(f"{seed} {next(place)}".encode()).digest(8 * count)
        return np.frombuffer(bytearray(text), dtype=np.uint64)

    return drawn


def cells(Z: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each cell of so many steps within 3 R was met, and the two beyond; and how often they should be."""
    edges = np.arange(-3 * SCALE, 3 * SCALE + 1, width) - 0.5
    wanted = np.diff(stats.norm.cdf([-np.inf, *(edges / SCALE), np.inf])) * len(Z)
    assert wanted.min() > 5
    return np.histogram(Z, bins=[-np.inf, *edges, np.inf])[0], wanted


def test_the_table_is_the_law_to_113_bits():
    """Each column of the table is read back into probabilities, as exact fractions."""
    top, rest, either = sampler._table()
    whole = 2**115
    found = [0] * 4096
    for column, (high, low) in enumerate(zip(top.tolist(), rest.tolist(), strict=True)):
        own, other = (int(number) >> 23 for number in either[2 * column : 2 * column + 2])
        part = (high << 64) + low
        assert own == column
        assert 0 <= part <= whole
        found[own] += part
        found[other] += whole - part
    assert sum(found) == 4096 * whole
    with mpmath.workdps(60):
        weights = [mpmath.exp(-mpmath.mpf(a * a) / 2**17) for a in range(4096)]
        total = mpmath.fsum(weights)
        apart = mpmath.fsum(
            abs(mpmath.mpf(n) / (4096 * whole) - w / total) for n, w in zip(found, weights, strict=True)
        )
        assert apart / 2 < mpmath.mpf(2) ** -114


@pytest.mark.parametrize("x", [2.0**-20, 0.01, 0.25, 0.7, 0.999])
def test_acceptance_has_the_probability_of_the_exponential(x):
    count, draw = 2**15, words(1)
    numerators = np.full(count, int(x * 2**63), dtype=np.uint64)
    accepted = int(sampler._exponential(draw, numerators, draw(count) >> np.uint64(23)).sum())
    assert stats.binomtest(accepted, count, math.exp(-x)).pvalue > 1e-3


def test_a_comparison_whose_leading_bits_are_equal_is_decided_by_the_rest():
    leading = np.full(4000, 5, dtype=np.uint64)
    x = (leading << np.uint64(22)) + np.uint64(2**21)
    # x / 2^63 is next to 0, so whoever is below it is refused at once: half of them.
    refused = ~sampler._exponential(words(2), x, leading)
    assert stats.binomtest(int(refused.sum()), 4000, 0.5).pvalue > 1e-3


def test_ties_with_the_table_are_decided_by_its_other_bits(monkeypatch):
    top, rest, either = (part.copy() for part in sampler._table())
    top[:], rest[:] = 0, 2**62  # a share of 0 ties: a quarter of these stay
    monkeypatch.setattr(sampler, "_table", lambda: (top, rest, either))
    draw = words(3)
    parts = iter([np.full(4000, 7, dtype=np.uint64)])  # column 7, share 0
    Z, _ = sampler._proposed(lambda count: next(parts) if parts.__length_hint__() else draw(count), 4000)
    assert stats.binomtest(int((np.abs(Z) >> 23 == 7).sum()), 4000, 0.25).pvalue > 1e-3


@pytest.mark.parametrize("k", [2, 3, 7])
def test_whole_numbers_below_k_are_uniform(k):
    counts = np.bincount(sampler._uniform(words(4), 6000, k).astype(int), minlength=k)
    assert stats.chisquare(counts).pvalue > 1e-3
    assert len(counts) == k


def test_draws_have_the_exact_law():
    """Chi-square over 194 cells; the low bits are uniform, and neighbours are independent."""
    Z = discrete_gaussian(words(5), 2**18)
    assert stats.chisquare(*cells(Z, 2**26)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(Z & 255, minlength=256)).pvalue > 1e-3
    assert abs(np.corrcoef(Z[1:], Z[:-1])[0, 1]) < 4.5 / 2**9
    assert abs(np.corrcoef(np.abs(Z[1:]), np.abs(Z[:-1]))[0, 1]) < 4.5 / 2**9
    assert np.array_equal(Z, discrete_gaussian(words(5), 2**18)), "the same words make the same numbers"


@pytest.mark.slow
def test_many_draws_have_the_exact_law_in_every_cell_and_within_the_cells():
    """Within a cell, probability falls: without the acceptance step the mean of b / M would be 1/2."""
    state, within, count = words(6), [], 2**24
    found = 0
    for _ in range(4):
        Z = discrete_gaussian(state, count)
        own, wanted = cells(Z, 2**23)
        found = found + own
        within.append(((np.abs(Z) & (2**23 - 1)) + 0.5).mean() / 2**23 - 0.5)
    assert stats.chisquare(found, 4 * wanted).pvalue > 1e-3
    # E[(b / M - 1/2)] = -E|Z| / R / (12 r) to first order, r = 2^8.
    expected, error = -math.sqrt(2 / math.pi) / (12 * 256), math.sqrt(1 / 12 / (4 * count))
    assert abs(float(np.mean(within)) - expected) < 4 * error
    assert abs(expected) > 6 * error
