"""The picture of a run, for streams of any length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from fcl_bench.execution import pictures as figures
from fcl_bench.execution.pictures import accuracy_figure


@pytest.mark.slow_cases("1", "10")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tasks", [1, 2, 10, 60])
def test_the_figure_shows_the_curve_and_the_matrix(tasks, tmp_path):
    matrix = np.where(np.tri(tasks, dtype=bool), 50.0 + np.arange(tasks), np.nan)
    pooled = list(np.linspace(90, 60, tasks))
    figure = accuracy_figure("title", pooled, matrix, list(range(2, 2 * tasks + 2, 2)))
    figure.savefig(tmp_path / "figure.png")
    curve, heat = figure.axes[:2]
    np.testing.assert_allclose(curve.lines[0].get_ydata(), pooled)
    np.testing.assert_allclose(curve.lines[1].get_ydata(), np.diag(matrix))
    assert heat.images[0].get_array().shape == (tasks, tasks)


def stream(tasks: int, least: float = 30, greatest: float = 100) -> tuple[list[float | None], np.ndarray, list[int]]:
    """Curve, matrix and classes seen of a made-up stream with 10 classes a task."""
    values = np.random.default_rng(0).uniform(least, greatest, (tasks, tasks))
    matrix = np.where(np.tri(tasks, dtype=bool), values, np.nan)
    return list(np.nanmean(matrix, axis=1)), matrix, list(range(10, 10 * tasks + 10, 10))


@pytest.mark.slow_cases("1-97.3", "1-99.9", "2-97.3", "2-99.9")
@pytest.mark.slow_cases("10-30", "10-97.3", "10-99.9", "100-99.9", "1000-30", "1000-97.3", "1000-99.9", "19-99.9")
@pytest.mark.parametrize("least", [30, 97.3, 99.9])
@pytest.mark.parametrize("tasks", [1, 2, 10, 19, 100, 1000])
def test_nothing_is_cut_off_and_no_name_lies_over_another(tasks, least):
    """The places are fixed, so labels of any stream have to fit there."""
    figure = accuracy_figure("title", *stream(tasks, least))
    figure.draw_without_rendering()
    curve, heat, bar = figure.axes
    boxes = [axes.get_tightbbox() for axes in (curve, heat, bar)]
    whole = figure.bbox
    for box in [*boxes, *(text.get_window_extent() for text in figure.texts)]:
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1
    for left, right in pairwise(boxes):
        assert left.x1 < right.x0
    for axes in (curve, heat):
        names = shown(axes, "x")
        assert len(names) > min(tasks, 4) / 2
        assert all(left.x1 < right.x0 for left, right in pairwise(names))
    for axes in (curve, heat, bar):
        names = sorted(shown(axes, "y"), key=lambda box: box.y0)
        assert all(low.y1 < high.y0 for low, high in pairwise(names))
    [title] = figure.texts
    assert max(box.y1 for box in boxes) < title.get_window_extent().y0


def shown(axes: Axes, which: str) -> list[Bbox]:
    """Where an axis's names are, of those inside its limits."""
    axis = getattr(axes, f"{which}axis")
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label.get_window_extent() for tick in ticks for label in (tick.label1, tick.label2) if label.get_visible()]


def test_the_figure_is_drawn_once(tmp_path, monkeypatch):
    """A layout engine has it drawn twice."""
    figure = accuracy_figure("title", *stream(10))
    drawn = []
    draw = Axes.draw
    monkeypatch.setattr(Axes, "draw", lambda self, renderer: (drawn.append(self), draw(self, renderer))[1])
    figure.savefig(tmp_path / "figure.png")
    assert len(drawn) == len(set(map(id, drawn))) == 3


@pytest.mark.parametrize(
    ("interval", "expected"),
    [((97.0, 100.0), (95, 100)), ((0.0, 1.0), (0, 5)), ((50.0, 51.0), (48, 53)), ((20.0, 90.0), (20, 90))],
)
def test_a_short_axis_is_widened_within_what_an_accuracy_can_be(interval, expected):
    assert figures._spanned(*interval) == pytest.approx(expected)


def test_the_margin_around_what_is_drawn_stays():
    low, high = figures._spanned(97.1, 100.2)
    assert (low, high) == pytest.approx((95.2, 100.2))
