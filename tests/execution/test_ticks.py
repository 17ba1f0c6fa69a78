"""Names of tasks on an axis: as many as there is room for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.execution.pictures import task_ticks


@given(tasks=st.integers(1, 20_000), width=st.integers(1, 12), inches=st.floats(0.5, 12))
def test_ticks_begin_with_the_first_task_in_round_steps_and_fit(tasks, width, inches):
    ticks = task_ticks(["8" * width] * tasks, inches)
    assert ticks[0] == 1
    assert ticks[-1] <= tasks
    assert 1 <= len(ticks) <= 20
    assert len(ticks) == 1 or len(ticks) * 0.075 * width < inches
    steps = set(np.diff(ticks))
    assert len(steps) <= 1
    assert all(str(step).rstrip("0") in ("1", "2", "5") for step in steps)


def test_every_task_is_named_where_all_names_fit():
    assert task_ticks([f"({10 * t})" for t in range(1, 11)], 4.4).tolist() == list(range(1, 11))
