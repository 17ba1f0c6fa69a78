"""What is bold, what is underlined, and how numbers are printed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.results.measures import MEASURES
from fcl_bench.results.tables.cells import best_and_second, marked_by_group, mean_and_spread, number

NUMBERS = st.lists(st.integers(-50, 50).map(lambda whole: f"{whole / 10:.1f}") | st.just(""), max_size=12)


def marks_oracle(texts: list[str], higher: bool) -> list[str]:
    """The best is better than or equal to every competitor; the second is beaten by the best alone."""
    values = [float(text) for text in texts if text]
    sign = 1 if higher else -1
    marks = []
    for text in texts:
        ahead = {value for value in values if text and sign * value > sign * float(text)}
        marks.append("" if not text or len(values) < 2 else {0: "bold", 1: "underline"}.get(len(ahead), ""))
    return marks


@given(NUMBERS, st.booleans())
def test_marks_are_as_a_slow_count_of_better_values_has_them(texts, higher):
    assert best_and_second(texts, higher) == marks_oracle(texts, higher)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=20), st.booleans())
def test_groups_do_not_compete_with_each_other(rows, higher):
    groups, printed = pd.Series([g for g, _ in rows]), pd.Series([str(v) for _, v in rows])
    marks = marked_by_group(printed, groups, higher)
    for group in set(groups):
        own = list(printed[groups == group])
        assert list(marks[groups == group]) == marks_oracle(own, higher)


@pytest.mark.parametrize(
    ("mean", "std", "places", "shown"),
    [
        (73.333, 3.512, 2, "73.33 ± 3.51"),
        (73.333, math.nan, 2, "73.33"),
        (4.0, 0.0, 2, "4.00 ± 0"),
        (0.1, 1e-9, 1, "0.1 ± 0.0"),
    ],
)
def test_a_spread_of_zero_is_not_one_that_was_rounded(mean, std, places, shown):
    assert mean_and_spread(mean, std, places) == shown


@given(st.floats(1e-9, 0.999, allow_subnormal=False))
def test_small_sizes_keep_three_digits_that_count(size):
    printed = number(size, MEASURES["up_max_mib"])
    assert float(printed) == pytest.approx(size, rel=0.006)
    assert len(printed) < 16


def test_directions_are_those_of_the_metrics():
    higher = {name for name, measure in MEASURES.items() if measure.higher}
    assert {"A_avg", "A_T", "A_T_tasks", "retention", "stability", "plasticity", "routing"} <= higher
    assert not {"forgetting", "up_max_mib", "fedran_mib", "seconds_per_task", "peak_memory_mib"} & higher
    assert np.all([measure.section == "accuracy" for measure in MEASURES.values() if measure.higher])
