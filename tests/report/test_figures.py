"""The picture of a run, for streams of any length."""

from __future__ import annotations

import numpy as np
import pytest

from fcl_bench.report.figures import accuracy_figure


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
