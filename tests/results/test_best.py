"""Who is the best and who is not distinguishable from it, against independent intervals and simulated truth."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fcl_bench.results.best import BEST, ONE_SEED, UNPAIRED, Verdict, judged, remarks
from fcl_bench.results.measures import MEASURES

NUMBERS = st.integers(-5, 5).map(float)
ROWS = st.lists(st.none() | st.dictionaries(st.integers(0, 3), NUMBERS | st.just(math.nan), max_size=4), max_size=6)


def row_of(*values: float):
    """Runs without stored answers, of seeds 0, 1, ..."""
    return {seed: (value, "") for seed, value in enumerate(values)}


def judge(*rows, measure="A_T", higher=True):
    return judged(rows, measure, higher)


def marks(*rows, **kwargs):
    return [verdict.mark for verdict in judge(*rows, **kwargs)]


def stored(folder, right, after=None, first=0):
    """A run of the one task `after` that keeps its answers; returns its folder and its accuracy."""
    folder.mkdir(parents=True)
    rows = [
        {"after": task, "sample": first + sample, "label": 1, "prediction": int(hit), "score": 0.5}
        for task, hits in enumerate(right)
        for sample, hit in enumerate(hits)
    ]
    pd.DataFrame(rows).to_parquet(folder / "predictions.parquet")
    return str(folder), [100 * float(np.mean(hits)) for hits in right]


def kept(tmp_path, name, *answers, measure="A_T", first=0):
    """A row whose run of seed s answered `answers[s]`: per task, whether each test sample so far was right."""
    runs = [stored(tmp_path / f"{name}{seed}", right, first=first) for seed, right in enumerate(answers)]
    values = [float(np.mean(by_task)) if measure == "A_avg" else by_task[-1] for _, by_task in runs]
    return {seed: (value, folder) for seed, (value, (folder, _)) in enumerate(zip(values, runs, strict=True))}


def test_the_interval_over_seeds_is_students_of_paired_differences():
    rng = np.random.default_rng(0)
    best, row = rng.normal(5, 1, 6), rng.normal(4, 1, 6)
    verdict = judge(row_of(*best), row_of(*row))[1]
    oracle = stats.ttest_rel(best, row).confidence_interval(0.95)
    assert (verdict.behind, verdict.samples) == (pytest.approx((best - row).mean()), 0)
    assert [verdict.low, verdict.high] == pytest.approx([oracle.low, oracle.high], abs=1e-3)


@pytest.mark.parametrize("higher", [True, False])
def test_a_row_is_marked_unless_it_is_worse_beyond_the_interval(higher):
    """A constant difference is told; the same mean difference is not where seeds disagree."""
    sign = 1 if higher else -1
    best, close, far = row_of(70, 72, 74), row_of(75, 66, 72), row_of(69, 71, 73)
    signed = [row_of(*(sign * value for value, _ in row.values())) for row in (far, close, best)]
    verdicts = judge(*signed, higher=higher)
    assert [verdict.mark for verdict in verdicts] == ["", "bold", "bold"]
    assert [verdict.behind for verdict in verdicts] == pytest.approx([1.0, 1.0, 0.0])
    assert (verdicts[0].low, verdicts[0].high) == pytest.approx((1.0, 1.0))
    assert verdicts[2].why == BEST


def test_means_that_print_alike_are_no_tie_and_exact_ties_are():
    assert marks(row_of(70.001, 70.001), row_of(70.002, 70.002), row_of(70.002, 70.002)) == ["", "bold", "bold"]
    assert marks(row_of(4.0), row_of(4.0), row_of(4.0 + 1e-9)) == ["", "", "bold"]
    assert marks(row_of(4.0), row_of(4.0), row_of(3.0)) == ["bold", "bold", ""]


def test_of_one_seed_without_answers_the_best_number_alone_is_marked():
    verdicts = judge(row_of(70.0), row_of(71.0), row_of(69.0))
    assert [verdict.mark for verdict in verdicts] == ["", "bold", ""]
    assert [verdict.why for verdict in verdicts] == [ONE_SEED, BEST, ONE_SEED]
    assert all(math.isnan(verdict.low) for verdict in verdicts)
    assert "the best number alone is bold" in remarks(enumerate_labels(verdicts))


def enumerate_labels(verdicts):
    return [(f"row {place}", verdict) for place, verdict in enumerate(verdicts)]


def test_a_lucky_single_seed_is_no_yardstick_for_rows_of_several():
    several, worse, lucky = row_of(70.0, 70.2, 70.4), row_of(60.0, 60.1, 60.5), row_of(70.5)
    verdicts = judge(several, worse, lucky)
    assert [verdict.why == BEST for verdict in verdicts] == [True, False, False]
    assert [verdict.mark for verdict in verdicts] == ["bold", "", "bold"]
    assert verdicts[2].behind == pytest.approx(-0.5)


def test_only_common_seeds_are_compared():
    best = row_of(50.0, 90.0, 90.0)
    row = {0: (51.0, ""), 1: (40.0, ""), 7: (99.0, "")}
    verdict = judge(best, row)[1]
    assert verdict.behind == pytest.approx((50 - 51 + 90 - 40) / 2)
    apart = judge(best, {7: (1.0, ""), 8: (2.0, "")})
    assert apart == [Verdict("bold", BEST, 0.0), Verdict(why=UNPAIRED)]
    assert remarks(enumerate_labels(apart)) == "Not compared, no seed in common: row 1."


def test_what_does_not_compete_is_not_marked_and_a_row_alone_neither():
    assert marks(row_of(1.0), None) == ["", ""]
    assert marks(row_of(math.nan, 5.0), row_of(2.0, 2.0), row_of(math.inf, 1.0), row_of()) == [""] * 4
    assert marks(None, row_of(2.0, 2.0), row_of(1.0, 1.0)) == ["", "bold", ""]
    assert judge() == []
    assert remarks([]) == ""


@settings(max_examples=40, deadline=None)
@given(ROWS, st.booleans(), st.randoms())
def test_neither_the_order_of_rows_nor_of_runs_matters(rows, higher, order: random.Random):
    made = [row and {seed: (value, f"{n}/{seed}") for seed, value in row.items()} for n, row in enumerate(rows)]
    verdicts = judged(made, "A_T", higher)
    places = order.sample(range(len(made)), len(made))
    turned = [made[place] and dict(reversed(made[place].items())) for place in places]
    assert repr(judged(turned, "A_T", higher)) == repr([verdicts[place] for place in places])
    best = [verdict for verdict in verdicts if verdict.why == BEST]
    there = [row for row in rows if row and np.isfinite(list(row.values())).all()]
    assert [verdict.mark for verdict in best] == ["bold"] * (len(there) > 1)


def test_the_interval_over_samples_is_scipys_bootstrap(tmp_path):
    rng = np.random.default_rng(1)
    best, row = rng.random((2, 400)) < np.array([[0.8], [0.7]])
    verdict = judge(kept(tmp_path, "a", [best]), kept(tmp_path, "b", [row]))[1]
    parts = 100 * (best.astype(float) - row)
    oracle = stats.bootstrap((parts,), np.mean, method="percentile", n_resamples=9999, rng=rng).confidence_interval
    assert verdict.behind == pytest.approx(parts.mean())
    assert verdict.samples == 400
    assert [verdict.low, verdict.high] == pytest.approx(list(oracle), abs=0.35)  # of a half width of 6
    assert verdict == judge(kept(tmp_path, "c", [best]), kept(tmp_path, "d", [row]))[1], "the draws are the same"


def test_answers_after_each_task_make_the_interval_of_their_mean(tmp_path):
    """A_avg by an oracle of whole tables: each draw weighs a sample alike after every task."""
    rng = np.random.default_rng(2)
    sizes = (40, 90, 150)
    answers = [[rng.random(size) < level for size in sizes] for level in (0.85, 0.75)]
    rows = [kept(tmp_path, name, right, measure="A_avg") for name, right in zip("ab", answers, strict=True)]
    verdict = judge(*rows, measure="A_avg")[1]
    parts = np.zeros(150)
    for ours, theirs in zip(*answers, strict=True):
        parts[: len(ours)] += 100 * (ours.astype(float) - theirs) / len(ours) / 3
    draws = [parts[rng.integers(150, size=150)].sum() for _ in range(5000)]
    assert verdict.behind == pytest.approx(parts.sum())
    assert [verdict.low, verdict.high] == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=0.6)
    second = [100 * right[1].mean() for right in answers]
    single = judge(*({0: (value, row[0][1])} for value, row in zip(second, rows, strict=True)), measure="A_2")[1]
    assert (single.samples, single.behind) == (90, pytest.approx(second[0] - second[1]))


def test_a_sample_is_drawn_with_its_answers_of_all_seeds(tmp_path):
    """The same answers in every seed say no more of other test samples than those of one."""
    rng = np.random.default_rng(3)
    best, row = rng.random((2, 300)) < np.array([[0.8], [0.76]])
    once = judge(kept(tmp_path, "a", [best]), kept(tmp_path, "b", [row]))[1]
    thrice = judge(kept(tmp_path, "c", *[[best]] * 3), kept(tmp_path, "d", *[[row]] * 3))[1]
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high), abs=1e-9)


def test_seeds_and_samples_both_widen_the_interval(tmp_path):
    rng = np.random.default_rng(4)
    levels = [(0.85, 0.8), (0.83, 0.82), (0.88, 0.76)]
    answers = [[[rng.random(200) < level] for level in pair] for pair in levels]
    rows = [kept(tmp_path, name, *of) for name, of in zip("ab", zip(*answers, strict=True), strict=True)]
    both = judge(*rows)[1]
    seeds = judge(*(row_of(*(value for value, _ in row.values())) for row in rows))[1]
    assert both.behind == seeds.behind
    assert both.high - both.low > seeds.high - seeds.low
    assert (both.samples, seeds.samples) == (200, 0)


def test_rows_of_other_test_samples_are_compared_by_seed_alone(tmp_path):
    right, fewer = [np.arange(50) < 40], [np.arange(50) < 39]
    best, row = kept(tmp_path, "a", right, right), kept(tmp_path, "b", right, fewer, first=7)
    [_, verdict] = judge(best, row)
    assert (verdict.samples, verdict.mark) == (0, "bold")
    assert "of other test samples" in verdict.why
    one = [{1: runs[1]} for runs in (best, row)]
    assert judge(*one)[1].why == f"{ONE_SEED}, of other test samples"


def test_answers_that_do_not_make_the_number_are_not_used(tmp_path):
    best, row = (kept(tmp_path, name, [np.arange(50) < right]) for name, right in (("a", 40), ("b", 30)))
    assert judge(best, row)[1].samples == 50
    assert judge(best, {0: (61.0, row[0][1])})[1].why == ONE_SEED
    assert judge(best, row, measure="forgetting")[1].why == ONE_SEED


def told(tmp_path, rng, trials, spread, noise, gap, seeds, samples=250):
    """How often a row that is worse by `gap` on average is told from the better one, and how often the interval of the
    difference holds the truth.

    Each seed shifts the difference by a normal of deviation `spread` points; test samples have a difficulty of their
    own (`noise`), the same in all seeds.
    """
    found, holds = 0, 0
    for trial in range(trials):
        shift = rng.normal(0, spread, seeds)
        own = rng.normal(0, noise, samples)  # what makes a sample easier for one of the two, in every seed
        p = 0.7 + own[None, :] / 2, 0.7 - own[None, :] / 2 - (gap + shift[:, None]) / 100
        answers = [rng.random((seeds, samples)) < level for level in p]
        rows = [
            kept(tmp_path, f"{trial}{name}", *([right] for right in of)) for name, of in zip("ab", answers, strict=True)
        ]
        verdicts = judge(*rows)
        worse = next(place for place, verdict in enumerate(verdicts) if verdict.why != BEST)
        truth = gap if worse == 1 else -gap
        found += not verdicts[worse].mark
        holds += verdicts[worse].low <= truth <= verdicts[worse].high
    return found / trials, holds / trials


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "noise", "seeds"), [(0.0, 0.3, 1), (4.0, 0.0, 4), (3.0, 0.3, 4)])
def test_the_interval_covers_the_true_difference(tmp_path, spread, noise, seeds):
    """95 % at least, by a simulation whose truth is known; equal methods are told apart as rarely."""
    rng = np.random.default_rng([seeds, int(10 * noise), int(spread)])
    found, holds = told(tmp_path / "equal", rng, 60, spread, noise, 0.0, seeds)
    assert holds >= 0.86, "95 % less three standard errors of 60 trials"
    assert found <= 0.13
    apart, holds = told(tmp_path / "apart", rng, 25, spread / 3, noise, 15.0, seeds)
    assert holds >= 0.85
    assert apart >= 0.8, "and what differs is told"


def test_of_an_interval_of_seeds_alone_the_coverage_is_right():
    rng = np.random.default_rng(5)
    holds = []
    for _ in range(250):
        best, row = rng.normal(100, 1, 3), rng.normal(0, 1, 3)
        verdict = judge(row_of(*best), row_of(*row))[1]
        holds.append(verdict.low <= 100 <= verdict.high)
    assert 0.91 <= np.mean(holds) <= 0.98


def test_a_sizes_differences_are_told_without_a_spread():
    sizes = [row_of(*[size] * 3) for size in (4.0, 2.0, 2.0)]
    assert marks(*sizes, measure="up_max_mib", higher=MEASURES["up_max_mib"].higher) == ["", "bold", "bold"]


def test_many_rows_take_little_time():
    """As many as 2,000 runs have; a loop over pairs of rows would take a minute."""
    rng = np.random.default_rng(6)
    rows = [row_of(*rng.normal(70, 3, 3)) for _ in range(700)]
    assert 0 < sum(mark == "bold" for mark in marks(*rows)) < 700
    for one, other in itertools.pairwise(marks(*rows[:5])):
        assert {one, other} <= {"", "bold"}
