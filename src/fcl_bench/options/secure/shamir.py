"""Shamir's secret sharing: any t of n shares determine a secret, and fewer reveal nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

#: The largest prime below 2^256: secrets and shares are numbers below it, of 32 bytes each.
PRIME = 2**256 - 189
BYTES = 32
#: Draws the given number of random bytes.
Draw = Callable[[int], bytes]


def drawn(draw: Draw) -> int:
    """Return a number of the field; uniform but for a share of 2^-248."""
    return int.from_bytes(draw(BYTES), "big") % PRIME


def as_bytes(number: int) -> bytes:
    """Return a number of the field in its 32 bytes."""
    return number.to_bytes(BYTES, "big")


def split(secret: int, points: Sequence[int], threshold: int, draw: Draw) -> list[int]:
    """Return f(x) at each of the points; f is a random polynomial of degree t - 1 with f(0) = secret.

    Args:
        secret: below `PRIME`.
        points: the holders', different from each other and above 0.
        threshold: t, at least 1.
        draw: makes its other coefficients.
    """
    coefficients = [drawn(draw) for _ in range(threshold - 1)]
    shares = []
    for x in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * x % PRIME
        shares.append((value + secret) % PRIME)
    return shares


def joined(shares: Mapping[int, int]) -> int:
    """Return the secret of t or more shares, by their points: f(0) by Lagrange's formula."""
    points = tuple(shares)
    return sum(weight * shares[x] for weight, x in zip(_weights(points), points, strict=True)) % PRIME


@lru_cache(maxsize=1024)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return prod over y != x of y / (y - x) for each x; most clients of a round have the same holders."""
    found = []
    for x in points:
        above = below = 1
        for y in points:
            if y != x:
                above, below = above * y % PRIME, below * (y - x) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
