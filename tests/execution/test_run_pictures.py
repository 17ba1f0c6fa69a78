"""The picture of drift for streams of any length, and which pictures a run leaves."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fcl_bench.execution.pictures import drawn, drift_figure
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import federation_of, image_tasks, tiny_context


def lower(tasks: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).random((tasks, tasks))
    return np.where(np.tri(tasks, dtype=bool), values, np.nan)


@pytest.mark.slow_cases("40")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tasks", [2, 3, 40])
def test_drift_is_drawn_from_each_tasks_own_column_and_against_accuracy(tasks, tmp_path):
    drift, accuracy = lower(tasks), 100 * lower(tasks, seed=1)
    figure = drift_figure("title", drift, accuracy)
    figure.savefig(tmp_path / "figure.png", dpi=40)
    lines, scatter = figure.axes
    assert len(lines.lines) == len(scatter.lines) == min(6, tasks - 1)
    shown = [int(line.get_label().removeprefix("task ")) - 1 for line in lines.lines]
    assert shown == sorted(set(shown))
    assert (shown[0], shown[-1]) == (0, tasks - 2)
    for tau, line, points in zip(shown, lines.lines, scatter.lines, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), np.arange(tau, tasks) + 1)
        np.testing.assert_array_equal(line.get_ydata(), drift[tau:, tau])
        np.testing.assert_array_equal(points.get_xdata(), drift[tau:, tau])
        np.testing.assert_array_equal(points.get_ydata(), accuracy[tau:, tau])


@pytest.mark.slow_cases("2-2-expected1")
@pytest.mark.parametrize(
    ("drift", "tasks", "expected"),
    [(0, 2, {"accuracy.png"}), (2, 2, {"accuracy.png", "drift.png"}), (2, 1, {"accuracy.png"})],
)
def test_a_run_leaves_pictures_of_what_it_measured(drift, tasks, expected):
    method = FedAvg(training=Training(rounds=1, epochs=1, augment="none"))
    data = image_tasks(np.random.default_rng(0), [2] * tasks, [[8, 8]] * tasks)
    federation = federation_of(method, tiny_context(), data, drift)
    federation.run(lambda _: None)
    record = {
        **{"method": method.name, "data": "made", "backbone": "tiny", "tasks": tasks, "clients": 2, "seed": 0},
        **{"partition": "iid", "beta": None, "metrics": {"accuracy": [50.0] * tasks}},
    }
    files = drawn(record, federation)
    assert set(files) == expected
    for file in files.values():
        with Image.open(io.BytesIO(file)) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 500


@pytest.mark.slow
def test_a_run_that_draws_nothing_imports_no_matplotlib():
    """One that was complete before only reports its record."""
    program = "import fcl_bench.execution.run, fcl_bench.execution.screen, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
