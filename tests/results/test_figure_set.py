"""Which figures there are for which runs, and that they show what the runs' folders hold."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import FillBetweenPolyCollection

from fcl_bench.results.collect import collect
from fcl_bench.results.figures.figure_set import figure_set
from fcl_bench.results.figures.rounds import progress
from fcl_bench.results.figures.style import METHODS, drawn
from tests.results.frames import made_up, real_runs

# pandas complains about the many columns of a frame that it is given.
pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore::pandas.errors.PerformanceWarning"),
]

TASKS = 5


def figures_of(folder, *runs):
    """The figures of made-up runs, each with a folder whose curve starts at its A_avg and falls by one a task."""
    frame = made_up(*runs)
    frame = frame.assign(folder=frame["run_id"])
    for run, start in zip(frame["run_id"], frame["A_avg"], strict=True):
        (folder / run).mkdir(exist_ok=True)
        curve = [start - task for task in range(TASKS)]
        (folder / run / "run.json").write_text(json.dumps({"metrics": {"accuracy": curve}}))
        matrix = np.tril(np.full((TASKS, TASKS), start)) + np.where(np.tri(TASKS) > 0, 0, np.nan)
        pd.DataFrame(matrix).to_csv(folder / run / "accuracy_matrix.csv", index=False)
    return figure_set(frame, folder)


def all_drawn(figures):
    """That they can be drawn, without a warning."""
    for figure in figures.values():
        assert drawn(figure, "svg")
    return figures


def points(axes):
    """Label-free: the data lines of error bars, as lists of points."""
    return [[tuple(point) for point in container.lines[0].get_xydata()] for container in axes.containers]


def caption(figure):
    return " ".join(figure.get_suptitle().split())


def test_one_run_has_its_curve_matrix_and_costs(tmp_path):
    assert list(all_drawn(figures_of(tmp_path, {}))) == [
        *("accuracy_over_tasks", "accuracy_against_bytes", "accuracy_against_seconds", "accuracy_matrix"),
    ]


def test_no_run_has_no_figure(tmp_path):
    assert figure_set(made_up({}).iloc[:0], tmp_path) == {}


def test_a_ceiling_has_no_costs_and_a_single_task_no_stream(tmp_path):
    assert list(all_drawn(figures_of(tmp_path, {"method": "joint"}))) == ["accuracy_over_tasks", "accuracy_matrix"]
    assert list(figures_of(tmp_path, {"tasks": 1})) == ["accuracy_against_bytes", "accuracy_against_seconds"]


def test_curves_are_means_over_seeds_with_a_band_of_one_deviation(tmp_path):
    runs = [{"seed": 0, "A_avg": 80.0}, {"seed": 1, "A_avg": 84.0}, {"method": "joint", "A_avg": 90.0}]
    figure = figures_of(tmp_path, *runs)["accuracy_over_tasks"]
    [axes] = figure.axes
    mean, ceiling = (line.get_ydata() for line in axes.lines)
    np.testing.assert_allclose(mean, [82, 81, 80, 79, 78])
    np.testing.assert_allclose(ceiling, [90, 89, 88, 87, 86])
    [band] = [part for part in axes.collections if isinstance(part, FillBetweenPolyCollection)]
    first = band.get_paths()[0].vertices
    first = first[first[:, 0] == 1][:, 1]
    assert np.ptp(first) == pytest.approx(2 * np.std([80, 84], ddof=1))
    assert "n = 1 to 2 seeds, without a deviation where it is 1" in caption(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedran", "joint (ceiling)"]


def test_devices_protocols_and_settings_have_panels_of_their_own(tmp_path):
    runs = [{"device": "cpu"}, {"device": "cuda"}, {"device": "cpu", "wire.dtype": "float16"}]
    figures = figures_of(tmp_path, *runs)
    for name in ("accuracy_over_tasks", "accuracy_against_seconds"):
        titles = {axes.get_title(loc="left") for axes in figures[name].axes}
        assert titles == {
            *("wire.dtype float32, device cpu", "wire.dtype float32, device cuda", "wire.dtype float16, device cpu"),
        }
    assert "2 more settings have no panel" in caption(figures["accuracy_matrix"])


@pytest.mark.parametrize(
    ("quantity", "values"), [("label_rate", (0.1, 0.5, 1.0)), ("beta", (0.1, 0.5, 5)), ("clients", (5, 20))]
)
def test_a_swept_quantity_has_a_line_for_each_configuration_that_has_two_values(tmp_path, quantity, values):
    base = {"label_rate": 1.0}
    swept = [{**base, quantity: value, "A_avg": 60 + i, "seed": s} for i, value in enumerate(values) for s in (0, 1)]
    lone = {**base, "method": "afl", quantity: values[0]}
    figures = figures_of(tmp_path, *reversed(swept), lone)
    name = f"accuracy_against_{quantity}"
    assert [
        n for n in figures if n.startswith("accuracy_against_") and n[17:] in ("label_rate", "beta", "clients")
    ] == [name]
    assert drawn(figures[name], "svg")
    left, right = figures[name].axes
    assert points(left) == [[(float(value), 60.0 + i) for i, value in enumerate(values)]]
    assert points(right) == [[(float(value), 70.0) for value in values]]
    assert [label.get_text() for label in left.get_xticklabels()] == [f"{value:g}" for value in values]


def test_runs_that_differ_in_more_than_the_quantity_are_not_joined(tmp_path):
    runs = [{"beta": 0.1, "clients": 5}, {"beta": 1.0, "clients": 20}, {"beta": 0.5, "clients": 5, "device": "cuda"}]
    figures = figures_of(tmp_path, *runs)
    assert not {"accuracy_against_beta", "accuracy_against_clients"} & set(figures)


def test_rank_by_M_needs_two_of_each_and_leaves_lone_runs_out(tmp_path):
    pairs = [(8, 64), (8, 128), (16, 64), (512, 2048)]
    assert "rank_by_M" not in figures_of(tmp_path, *({"method_rank": r, "method_M": M} for r, M in pairs[1:]))
    runs = [
        {"method_rank": r, "method_M": M, "A_avg": 50.0 + r + M / 64, "up_max_mib": r * M / 1024}
        for r, M in [*itertools.product((8, 16, 32), (64, 128)), (512, 2048)]
        if (r, M) != (32, 128)
    ]
    figure = figures_of(tmp_path, *runs)["rank_by_M"]
    assert drawn(figure, "svg")
    lines, heat = figure.axes[:2]
    # r = 32 has one M only, and M = 2048 one r only.
    assert points(lines) == [[(8.0, 59.0), (16.0, 67.0)], [(8.0, 60.0), (16.0, 68.0)]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["M = 64", "M = 128"]
    np.testing.assert_allclose(heat.images[0].get_array(), [[59, 67], [60, 68]])
    assert [text.get_text() for text in heat.texts] == [
        *("59.0\n0.5 MiB", "67.0\n1 MiB", "60.0\n1 MiB", "68.0\n2 MiB"),
    ]


def test_a_hole_in_the_grid_says_not_run(tmp_path):
    runs = [{"method_rank": r, "method_M": M} for r, M in itertools.product((8, 16, 32), (64, 128, 256))]
    figure = figures_of(tmp_path, *(run for run in runs if run != {"method_rank": 16, "method_M": 128}))["rank_by_M"]
    assert [text.get_text() for text in figure.axes[1].texts].count("not run") == 1


def test_a_method_looks_the_same_in_every_figure(tmp_path):
    runs = [{"method": m, "beta": b, "label_rate": 1.0} for m in ("afl", "stsa", "fedran") for b in (0.1, 1.0)]
    figures = figures_of(tmp_path, *runs)
    for name in ("accuracy_over_tasks", "accuracy_against_bytes", "accuracy_against_seconds", "accuracy_against_beta"):
        seen = {h.get_label(): (h.get_color(), h.get_marker()) for h in figures[name].legends[0].legend_handles}
        assert {method: seen[method] for method in ("afl", "stsa", "fedran")} == {
            method: METHODS[method] for method in ("afl", "stsa", "fedran")
        }


def test_the_matrix_is_the_mean_over_seeds_with_nothing_above_the_diagonal(tmp_path):
    figure = figures_of(tmp_path, {"seed": 0, "A_avg": 60.0}, {"seed": 1, "A_avg": 80.0})["accuracy_matrix"]
    shown = np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)
    np.testing.assert_allclose(shown, np.where(np.tri(TASKS) > 0, 70, np.nan))
    assert [text.get_text() for text in figure.axes[0].texts] == ["70"] * (TASKS * (TASKS + 1) // 2)


def test_real_runs_are_drawn_as_recorded(tmp_path):
    folder = real_runs(tmp_path) / "runs"
    frame = collect(folder)
    figure = figure_set(frame, folder)["accuracy_over_tasks"]
    recorded = [json.loads((folder / name / "run.json").read_text())["metrics"]["accuracy"] for name in frame["folder"]]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), np.mean(recorded, axis=0))


def test_many_runs_of_many_kinds_are_a_picture_too(tmp_path):
    runs = [{"method": f"method{i}", "data": d} for i in range(12) for d in ("$\\a$", *"bcdefg")]
    figures = figures_of(tmp_path, *runs)
    assert drawn(figures["accuracy_over_tasks"], "svg")
    assert len(figures["accuracy_over_tasks"].axes) == 6
    assert "Of 12 configurations 10 are drawn" in caption(figures["accuracy_over_tasks"])
    assert max(figure.get_size_inches()[1] for figure in figures.values()) < 20


def trained_for_rounds(folder, accuracies, tested=True):
    """A run folder of one task: a round for each accuracy, two clients that send 1 and 2 MiB and take 1 and 3 s."""
    folder.mkdir()
    rounds = range(len(accuracies))
    rows = [(0, r, k, (k + 1) * 2**20, 1.0 + 2 * k) for r in rounds for k in (0, 1)]
    columns = ["task", "round", "client", "up_bytes", "client_seconds"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "uploads.csv", index=False)
    tasks = {"task": [0], "accuracy": [accuracies[-1]], "server_seconds": [0.5 * len(accuracies)]}
    pd.DataFrame(tasks).to_csv(folder / "tasks.csv", index=False)
    if tested:
        measured = {"task": [0 for _ in rounds], "round": rounds, "accuracy": accuracies}
        pd.DataFrame(measured).to_csv(folder / "rounds.csv", index=False)


def test_rounds_are_drawn_against_rounds_upload_and_seconds(tmp_path):
    trained = {"method": "finetune", "tasks": 1}
    frame = made_up(
        {**trained, "A_T_best": 60.0},
        {**trained, "A_T_best": 62.0, "seed": 1},
        {"method": "afl", "tasks": 1},
        {"method": "joint", "tasks": 1},
    )
    frame = frame.assign(folder=frame["run_id"])
    for run, accuracies in zip(frame["run_id"], ([10.0, 60.0, 50.0], [14.0, 62.0, 58.0], [70.0], [80.0]), strict=True):
        trained_for_rounds(tmp_path / run, accuracies, tested=len(accuracies) > 1)
    figure = all_drawn(figure_set(frame, tmp_path))["accuracy_over_rounds"]
    over_rounds, over_upload, over_seconds = figure.axes
    afl, finetune, joint = ([tuple(point) for point in line.get_xydata()] for line in over_rounds.lines)
    assert joint == [(0, 80.0), (1, 80.0)]
    assert finetune == [(1, 12.0), (2, 61.0), (3, 54.0)]
    assert afl == [(1, 70.0)]
    # The busiest client's 2 MiB each round; the clients' mean of 2 s and half a second of the server's.
    assert list(over_upload.lines[1].get_xdata()) == [2, 4, 6]
    assert list(over_seconds.lines[1].get_xdata()) == [2.5, 5, 7.5]


def test_upload_counts_up_for_each_client_and_over_tasks(tmp_path):
    """Of two clients that take turns, neither has sent what both have."""
    rows = [(0, 0, 0, 2**20), (0, 1, 1, 2**20), (1, 0, 0, 2**21)]
    uploads = pd.DataFrame(rows, columns=["task", "round", "client", "up_bytes"]).assign(client_seconds=0.0)
    uploads.to_csv(tmp_path / "uploads.csv", index=False)
    tasks = pd.DataFrame({"task": [0, 1], "accuracy": [50.0, 40.0], "server_seconds": [0.0, 1.0]})
    tasks.to_csv(tmp_path / "tasks.csv", index=False)
    found = progress(tmp_path)
    assert found[["rounds", "mib", "seconds", "accuracy"]].to_numpy().tolist() == [[2, 1, 0, 50], [3, 3, 1, 40]]


def test_without_rounds_that_were_tested_there_is_no_such_figure(tmp_path):
    assert "accuracy_over_rounds" not in figures_of(tmp_path, {})
