"""The discrete Gaussian N_Z(0, R^2): P(k) proportional to exp(-k^2 / (2 R^2)) on the integers, by whole numbers alone.

After Canonne, Kamath and Steinke (2020), Algorithms 1 and 3, on arrays; R = 2^31, M = 2^23, r = R / M = 2^8:

- |Z| = a M + b is proposed with P(a) ~ exp(-a^2 / (2 r^2)) and b uniform in 0 .. M - 1, and accepted with probability
  exp(-x), x = b (2 a M + b) / (2 R^2) < 1: its weight is exp(-|Z|^2 / (2 R^2)). The proposal -0 is refused.
- exp(-x) is met by Algorithm 1: of A_K, Bernoulli(x / K), K = 1, 2, ..., the first that fails has an odd K. 2 R^2 is
  2^63, so x is a whole number over 2^63, without rounding.
- a comes from an alias table (Walker, 1977; Vose, 1991) of whole numbers.

Only the table is no exact law: it ends at 16 R, and its 4,096 probabilities are rounded to 2^-127. So a number's total
variation distance from N_Z(0, R^2) is below 2^-113.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache

import numpy as np

#: R, the standard deviation in steps of the grid, and bounds of what may be drawn: |Z| < 16 R.
SCALE = 2**31
#: Bits of a column of the table, of the share of a column that is compared at first and of its rest, and of b.
_COLUMN, _SHARE, _REST, _WITHIN = 12, 51, 64, 23
_TAIL = 63 - (64 - _WITHIN)  # bits of the comparison with x that do not fit beside b
#: How many numbers are drawn at a time: what they need stays in the processor's cache.
_BLOCK = 2**15
#: Makes so many uniform numbers of 64 bits.
Words = Callable[[int], np.ndarray]


def discrete_gaussian(words: Words, count: int) -> np.ndarray:
    """(count,) int64, independent draws from N_Z(0, SCALE^2)."""
    found = np.empty(count, dtype=np.int64)
    for begin in range(0, count, _BLOCK):
        block = found[begin : begin + _BLOCK]
        block[:], accepted = _proposed(words, len(block))
        while len(missing := np.flatnonzero(~accepted)):
            block[missing], accepted[missing] = _proposed(words, len(missing))
    return found


def _proposed(words: Words, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (count,) int64, and which of them are accepted."""
    top, rest, either = _table()
    first, second = words(count), words(count)
    column, share = (first & np.uint64(2**_COLUMN - 1)).view(np.int64), first >> np.uint64(_COLUMN + 1)
    other = share >= (limit := top.take(column))
    if len(ties := np.flatnonzero(share == limit)):
        other[ties] = words(len(ties)) >= rest[column[ties]]
    lower = either.take(2 * column + other)
    within = second & np.uint64(2**_WITHIN - 1)
    size = lower + within
    accepted = _exponential(words, within * (lower + size), second >> np.uint64(_WITHIN))
    negative = (first >> np.uint64(_COLUMN)).view(np.int64) & 1
    accepted &= (size > 0) | (negative == 0)
    return size.view(np.int64) * (1 - 2 * negative), accepted


def _exponential(words: Words, x: np.ndarray, leading: np.ndarray) -> np.ndarray:
    """(n,) bool, each true with probability exp(-x / 2^63).

    Args:
        x: (n,) uint64, below 2^63.
        leading: (n,) uint64, the leading bits of a uniform number of 63 bits for the first comparison.
    """
    accepted = np.ones(len(x), dtype=bool)
    live = np.flatnonzero(leading <= x >> np.uint64(_TAIL))
    below = ((leading[live] << np.uint64(_TAIL)) | (words(len(live)) >> np.uint64(64 - _TAIL))) < x[live]
    live, k = live[below], 1
    while len(live):
        k += 1
        below = (words(len(live)) >> np.uint64(1) < x[live]) & (_uniform(words, len(live), k) == 0)
        accepted[live[~below]] = k % 2 == 1
        live = live[below]
    return accepted


def _uniform(words: Words, count: int, k: int) -> np.ndarray:
    """(count,) uint64, uniform in 0 .. k - 1."""
    drawn, limit = words(count), np.uint64(2**64 // k * k - 1)
    while len(beyond := np.flatnonzero(drawn > limit)):
        drawn[beyond] = words(len(beyond))
    return drawn % np.uint64(k)


@cache
def _table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of 4,096 columns, the share that is its own (its leading bits, and the rest), and M times both numbers.

    Vose's construction, exact: each column has 2^115 of the 2^127 equal parts of all probability.
    """
    columns, whole = 2**_COLUMN, 2 ** (_SHARE + _REST)
    with localcontext() as digits:
        digits.prec = 60
        weights = [(Decimal(-a * a) / (2 * (SCALE >> _WITHIN) ** 2)).exp() for a in range(columns)]
        each = columns * whole / sum(weights)
        parts = [int(weight * each) for weight in weights]
    parts[0] += columns * whole - sum(parts)
    alias = list(range(columns))
    small = [a for a in alias if parts[a] < whole]
    large = [a for a in alias if parts[a] >= whole]
    while small:
        less, more = small.pop(), large[-1]
        alias[less] = more
        parts[more] -= whole - parts[less]
        if parts[more] < whole:
            small.append(large.pop())
    top = np.array([part >> _REST for part in parts], dtype=np.uint64)
    rest = np.array([part & (2**_REST - 1) for part in parts], dtype=np.uint64)
    either = np.stack([np.arange(columns), np.array(alias)], axis=1).astype(np.uint64) << np.uint64(_WITHIN)
    return top, rest, either.ravel()
