"""How far replacing one sample moves a client's statistics, all fields together (docs/explanation/noise.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fcl_bench.protocol.fields import COLUMN, COUNT, SQUARE

#: The most that |h h' - g g'|^2 + |h - g|^2 can be for two samples of one class, by which of the two terms there are.
_SAME_CLASS = {frozenset(): 0.0, frozenset({SQUARE}): 2.0, frozenset({COLUMN}): 4.0, frozenset({SQUARE, COLUMN}): 4.5}


def sensitivity(summands: Mapping[str, str]) -> tuple[float, float]:
    """Return Delta and v: the L2 sensitivity of (G, S, v n) for samples with |h| <= 1, and the weight v of the counts.

    The replaced sample may have any features and any class. With the same class the counts stay as they are; with
    another one h and g share no column, and the squares add up: 2 (1 + 1 + v^2) with all three fields. v is the largest
    with which the second case is no worse than the first, so that counts cost nothing; 1 where that would be 0.

    Args:
        summands: the kind of each field, each kind at most once.
    """
    kinds = list(summands.values())
    if len(set(kinds)) < len(kinds) or not kinds:
        raise ValueError(f"no sensitivity of {dict(summands)}")
    moments = frozenset(kinds) - {COUNT}
    same = _SAME_CLASS[moments]
    weight = 0.0
    if COUNT in kinds:
        free = same / 2 - len(moments)
        weight = math.sqrt(free) if free > 0 else 1.0
    return math.sqrt(max(same, 2 * (len(moments) + weight**2))), weight


def deviations(summands: Mapping[str, str], clip: float, multiplier: float) -> dict[str, float]:
    """Return the standard deviation of the noise of each field, in its own unit.

    Args:
        summands: the kind of each field.
        clip: upper bound of |h|.
        multiplier: noise over sensitivity.
    """
    delta, weight = sensitivity(summands)
    of_kind = {SQUARE: clip**2, COLUMN: clip, COUNT: 1 / weight if weight else 0.0}
    return {name: multiplier * delta * of_kind[kind] for name, kind in summands.items()}
