"""Which tasks of a long stream an axis names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

#: Of Matplotlib's usual letters (10 points), with their brackets and the room between two labels.
_INCHES_A_CHARACTER, _GAP_INCHES = 0.075, 0.06
#: More names than that are only noise.
_MOST = 20


def task_ticks(labels: Sequence[str], inches: float) -> np.ndarray:
    """The numbers of the tasks, from 1, to put names at: in steps of 1, 2, 5, 10, 20, ..., none over its neighbour.

    Args:
        labels: each task's name on the axis, the longest of its lines.
        inches: length of the axis.
    """
    room = _INCHES_A_CHARACTER * max(map(len, labels)) + _GAP_INCHES
    most = max(1, min(_MOST, int(inches / room)))
    least = -(-len(labels) // most)
    decade = 10 ** (len(str(least)) - 1)
    step = next(times * decade for times in (1, 2, 5, 10) if times * decade >= least)
    return np.arange(1, len(labels) + 1)[::step]


def name_tasks(heat: Axes, tasks: int, inches: float) -> None:
    """Put the tasks' numbers beside a heat map of T x T cells whose axes have this length."""
    ticks = task_ticks([str(t) for t in range(1, tasks + 1)], inches)
    heat.set_xticks(ticks - 1, ticks)
    heat.set_yticks(ticks - 1, ticks)
