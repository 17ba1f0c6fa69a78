"""How numbers are printed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.results.measures import MEASURES
from fcl_bench.results.tables.cells import Cell, decimals, mean_cell, value_cell


@pytest.mark.parametrize(
    ("mean", "std", "places", "n", "shown", "number"),
    [
        (73.333, 3.512, 2, None, "73.33 ± 3.51", 73.33),
        (73.333, math.nan, 2, 1, "73.33 (1)", 73.33),
        # A spread of zero is not one that was rounded.
        (4.0, 0.0, 2, 3, "4.00 ± 0 (3)", 4.0),
        (0.1, 1e-9, 1, None, "0.1 ± 0.0", 0.1),
        # To the nearest, as a reader compares it, not what its double in hundredths rounds to.
        (np.float64(2.675), math.nan, 2, None, "2.67", 2.67),
    ],
)
def test_a_mean_is_shown_with_its_spread_and_sorts_as_it_is_shown(mean, std, places, n, shown, number):
    assert mean_cell(mean, std, places, "bold", n) == Cell(shown, "bold", number)


def test_what_is_not_defined_is_absent():
    assert mean_cell(math.nan, math.nan, 2, n=3) == Cell("not defined", absent=True)


@pytest.mark.parametrize(
    ("value", "shown", "number"),
    [(0.10, "0.1", 0.1), (2048, "2048", 2048.0), (np.int64(3), "3", 3.0), (True, "true", None), ("null", "null", None)],
)
def test_a_value_is_shown_as_it_is_typed(value, shown, number):
    assert value_cell(value) == Cell(shown, number=number)


def test_a_key_that_a_run_has_not_is_none():
    assert value_cell(math.nan) == Cell("none")


@given(st.floats(1e-9, 0.999, allow_subnormal=False))
def test_small_sizes_keep_three_digits_that_count(size):
    printed = mean_cell(size, math.nan, decimals(size, MEASURES["up_max_mib"])).text
    assert float(printed) == pytest.approx(size, rel=0.006)
    assert len(printed) < 16


def test_directions_are_those_of_the_metrics():
    higher = {name for name, measure in MEASURES.items() if measure.higher}
    assert {"A_avg", "A_T", "A_T_tasks", "retention", "stability", "plasticity", "routing"} <= higher
    assert not {"forgetting", "up_max_mib", "fedran_mib", "seconds_per_task", "peak_memory_mib"} & higher
    assert np.all([measure.section == "accuracy" for measure in MEASURES.values() if measure.higher])
