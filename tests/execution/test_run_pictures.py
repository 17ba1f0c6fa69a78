"""The pictures of drift and of projection for streams of any length, and which a run leaves."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fcl_bench.execution.pictures import drawn, drift_figure, rounds_figure, theory_figure
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.projection.fedprotip import FedProTIP
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


def theory_rows(tasks: int) -> list[dict[str, float | None]]:
    """As `ProjectionAudit` reports them; what is not defined is None."""
    rng = np.random.default_rng(0)
    rows = []
    for t in range(tasks):
        row = {"rho": float(rng.random()), "rho_min": float(rng.random()), "beta": None, "beta_max": None}
        rows.append({**row, **{f"beta_{tau}": float(rng.random()) for tau in range(t)}})
    return rows


@pytest.mark.slow_cases("2")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tasks", [1, 2, 30])
def test_rho_is_drawn_as_curves_and_beta_as_a_triangle(tasks, tmp_path):
    rows = theory_rows(tasks)
    figure = theory_figure("title", rows)
    figure.savefig(tmp_path / "figure.png", dpi=40)
    adequacy, interference = figure.axes[:2]
    np.testing.assert_array_equal(adequacy.lines[0].get_ydata(), [row["rho"] for row in rows])
    np.testing.assert_array_equal(adequacy.lines[1].get_ydata(), [row["rho_min"] for row in rows])
    beta = np.ma.filled(interference.images[0].get_array(), np.nan)
    for (tau, t), value in np.ndenumerate(beta):
        if tau < t:
            assert value == rows[t][f"beta_{tau}"]
        else:
            assert np.isnan(value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tasks", [1, 3])
def test_what_is_not_defined_is_left_out_of_the_picture(tasks, tmp_path):
    rows = [dict.fromkeys(row) for row in theory_rows(tasks)]
    figure = theory_figure("title", rows)
    figure.savefig(tmp_path / "figure.png", dpi=40)
    assert np.isnan(figure.axes[0].lines[0].get_ydata()).all()
    assert np.ma.getmaskarray(np.ma.masked_invalid(figure.axes[1].images[0].get_array())).all()


@pytest.mark.filterwarnings("error")
def test_projection_leaves_a_value_of_exactly_one_inside_the_picture(tmp_path):
    figure = theory_figure("title", [{"rho": 1.0, "rho_min": 1.0, "beta": None, "beta_max": None}])
    assert figure.axes[0].get_ylim()[1] > 1


def test_rounds_of_all_tasks_follow_one_another_with_the_best_of_each():
    """The second task has a round more than the first, and the third no test sample."""
    rows = [(0, 1, 50.0), (0, 3, 40.0), (1, 1, 10.0), (1, 4, 30.0), (2, 3, float("nan"))]
    best = {"every": 2, "best": [50.0, 30.0, None], "best_round": [1, 4, None]}
    line, stars, *ends = rounds_figure("title", rows, best).axes[0].get_lines()
    assert line.get_xdata().tolist() == [2, 4, 6, 9, 13]
    np.testing.assert_array_equal(line.get_ydata(), [50, 40, 10, 30, np.nan])
    assert (list(stars.get_xdata()), list(stars.get_ydata())) == ([2, 9], [50, 30])
    assert stars.get_label() == "best, chosen on test data"
    assert [end.get_xdata()[0] for end in ends] == [4, 9]


def test_evaluated_rounds_leave_their_picture():
    data = image_tasks(np.random.default_rng(0), [2], [[8, 8]])
    method = FedAvg(training=Training(rounds=3, epochs=1, augment="none"))
    federation = federation_of(method, tiny_context(), data, evaluate_rounds=2)
    federation.run(lambda _: None)
    named = {"method": "fedavg", "data": "made", "backbone": "tiny", "tasks": 1, "clients": 2, "seed": 0}
    measured = {"bounds": [], "rounds": federation.rounds.best(), "metrics": {"accuracy": [50.0]}}
    files = drawn({**named, "partition": "iid", "beta": None, **measured}, federation)
    assert set(files) == {"accuracy.png", "rounds.png"}


@pytest.mark.slow_cases("0-2-2-expected3", "2-0-2-expected1", "2-2-1-expected5", "2-2-2-expected4")
@pytest.mark.parametrize(
    ("drift", "theory", "tasks", "expected"),
    [
        (0, 0, 2, {"accuracy.png"}),
        (2, 0, 2, {"accuracy.png", "drift.png"}),
        (2, 0, 1, {"accuracy.png"}),
        (0, 2, 2, {"accuracy.png", "theory.png"}),
        (2, 2, 2, {"accuracy.png", "drift.png", "theory.png"}),
        (2, 2, 1, {"accuracy.png", "theory.png"}),
    ],
)
def test_a_run_leaves_pictures_of_what_it_measured(drift, theory, tasks, expected):
    training = Training(rounds=1, epochs=1, augment="none")
    method = FedProTIP(training=training, theory=theory) if theory else FedAvg(training=training)
    data = image_tasks(np.random.default_rng(0), [2] * tasks, [[8, 8]] * tasks)
    federation = federation_of(method, tiny_context(), data, drift)
    federation.run(lambda _: None)
    record = {
        **{"method": method.name, "data": "made", "backbone": "tiny", "tasks": tasks, "clients": 2, "seed": 0},
        **{
            "partition": "iid",
            "beta": None,
            "bounds": federation.audits["bounds"].rows if theory else [],
            "rounds": federation.rounds.best(),
            "metrics": {"accuracy": [50.0] * tasks},
        },
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
