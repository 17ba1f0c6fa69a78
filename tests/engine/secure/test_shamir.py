"""Shamir's shares, against polynomials in plain whole numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fcl_bench.options.secure.masks import BYTES, PRIME, as_bytes, drawn, joined, split


def draws(seed: int):
    return np.random.default_rng(seed).bytes


def test_the_field_is_one():
    """By Fermat's little theorem, for a few bases: no composite number of this size passes all of them by chance."""
    assert PRIME < 2 ** (8 * BYTES)
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13, 17, 19, 23))


@pytest.mark.parametrize(("threshold", "holders"), [(1, 1), (1, 3), (2, 2), (2, 5), (4, 6), (6, 6)])
def test_any_t_shares_tell_the_secret(threshold, holders):
    secret, points = drawn(draws(1)), [3 * place + 1 for place in range(holders)]
    shares = dict(zip(points, split(secret, points, threshold, draws(2)), strict=True))
    for size in range(threshold, holders + 1):
        for chosen in itertools.combinations(points, size):
            assert joined({x: shares[x] for x in chosen}) == secret


def test_shares_are_a_polynomial_of_the_drawn_coefficients():
    draw = draws(5)
    coefficients = [int.from_bytes(draw(BYTES), "big") % PRIME for _ in range(3)]
    expected = [(12345 + sum(c * x ** (3 - n) for n, c in enumerate(coefficients))) % PRIME for x in (1, 2, 9)]
    assert split(12345, [1, 2, 9], 4, draws(5)) == expected


def test_fewer_shares_fit_any_secret():
    """For every other secret there is a polynomial through the same t - 1 shares: so they tell nothing."""
    points, secret = [1, 2, 3], drawn(draws(3))
    shares = split(secret, points, 3, draws(4))
    for other in (0, 1, PRIME - 1, drawn(draws(8))):
        third = joined_at({0: other, 1: shares[0], 2: shares[1]}, 3)
        assert joined({1: shares[0], 2: shares[1], 3: third}) == other
    assert joined({1: shares[0], 2: shares[1]}) != secret


def joined_at(values: dict[int, int], x: int) -> int:
    """Lagrange's formula, written out."""
    total = 0
    for at, value in values.items():
        term = value
        for other in values:
            if other != at:
                term = term * (x - other) * pow(at - other, PRIME - 2, PRIME) % PRIME
        total = (total + term) % PRIME
    return total


@pytest.mark.parametrize("secret", [0, 1, PRIME - 1])
def test_the_ends_of_the_field(secret):
    shares = split(secret, [1, 2, 3], 2, draws(0))
    assert all(len(as_bytes(share)) == BYTES for share in shares)
    assert joined({1: shares[0], 3: shares[2]}) == secret
