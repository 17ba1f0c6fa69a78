"""Which figures there are for which runs, and that they show what the runs' folders hold."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import FillBetweenPolyCollection

from fcl_bench.errors import UserError
from fcl_bench.results.collect import collect
from fcl_bench.results.figures.curves import chart_rows, progress
from fcl_bench.results.figures.figure_set import FIGURES, figure_set
from fcl_bench.results.figures.selection import METHODS, drawn
from fcl_bench.results.reference import FROM
from fcl_bench.results.summarise import split_by_setting, summarise, used_runs
from tests.results.frames import made_up, real_runs

# pandas complains about the many columns of a frame that it is given.
pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore::pandas.errors.PerformanceWarning"),
]

TASKS = 5
#: The one figure that many tests look at.
CURVES = ["accuracy_over_tasks"]


def figures_of(folder, *runs, only=FIGURES):
    """The figures of made-up runs, each with a folder whose curve starts at its A_avg and falls by one a task."""
    frame = made_up(*runs)
    frame = frame.assign(folder=frame["run_id"])
    for run, start in zip(frame["run_id"], frame["A_avg"], strict=True):
        (folder / run).mkdir(exist_ok=True)
        curve = [start - task for task in range(TASKS)]
        (folder / run / "run.json").write_text(json.dumps({"metrics": {"accuracy": curve}}))
        matrix = np.tril(np.full((TASKS, TASKS), start)) + np.where(np.tri(TASKS) > 0, 0, np.nan)
        pd.DataFrame(matrix).to_csv(folder / run / "accuracy_matrix.csv", index=False)
    return figure_set(frame, folder, only)


def all_drawn(figures):
    """That they can be drawn, without a warning."""
    for figure in figures.values():
        assert drawn(figure, "svg")
    return figures


def points(axes):
    """Label-free: the data lines of error bars, as lists of points."""
    return [[tuple(point) for point in container.lines[0].get_xydata()] for container in axes.containers]


def caption(figure):
    return figure.caption


@pytest.mark.slow
def test_one_run_has_its_curve_and_matrix_and_no_panel_of_a_single_dot(tmp_path):
    assert list(all_drawn(figures_of(tmp_path, {}))) == ["accuracy_over_tasks", "accuracy_matrix"]


@pytest.mark.slow
def test_two_rivals_in_one_setting_are_compared_and_a_lone_one_beside_them_is_not(tmp_path):
    figures = all_drawn(figures_of(tmp_path, {}, {"method": "afl"}, {"method": "afl", "beta": 1.0, "A_avg": 61.0}))
    assert list(figures) == [
        *("accuracy_over_tasks", "accuracy_against_bytes", "accuracy_against_seconds"),
        *("accuracy_against_beta", "accuracy_matrix"),
    ]
    assert len(figures["accuracy_against_bytes"].axes) == 2
    assert len(figures["accuracy_over_tasks"].axes) == 2


def test_only_wanted_figures_are_drawn(tmp_path):
    frame = made_up({}, {"method": "afl"})
    assert list(figure_set(frame.assign(folder="none", tasks=1), tmp_path, ["accuracy_against_bytes"])) == [
        "accuracy_against_bytes"
    ]


@pytest.mark.slow
def test_reference_runs_are_in_figures_without_curves_and_seconds(tmp_path):
    settings = [{}, {"method": "afl"}, {"beta": 1.0, "A_avg": 61.0}, {"method": "afl", "beta": 1.0, "A_avg": 61.0}]
    frame = made_up(*settings)
    reference = frame.assign(folder="", seconds_per_task=np.nan, **{FROM: "reference"})
    alone = ["accuracy_against_bytes", "accuracy_against_beta"]
    assert list(all_drawn(figure_set(reference, tmp_path))) == alone
    # Beside one's own runs of the same settings, even with the same ids, only those have curves.
    figures_of(tmp_path, *settings, only=())
    both = pd.concat([frame.assign(folder=frame["run_id"], **{FROM: np.nan}), reference], ignore_index=True)
    figures = all_drawn(figure_set(both, tmp_path))
    assert list(figures) == [
        *("accuracy_over_tasks", "accuracy_against_bytes", "accuracy_against_seconds"),
        *("accuracy_against_beta", "accuracy_matrix"),
    ]
    named = {
        name: [entry.get_text() for entry in figures[name].legends[0].get_texts()]
        for name in figures
        if name != "accuracy_matrix"
    }
    assert named["accuracy_over_tasks"] == ["afl", "fedran"]
    assert sorted(named["accuracy_against_beta"]) == [
        *("afl", "afl from=reference", "fedran", "fedran from=reference"),
    ]


def test_no_run_has_no_figure(tmp_path):
    assert figure_set(made_up({}).iloc[:0], tmp_path) == {}


@pytest.mark.slow
def test_a_ceiling_has_no_costs_and_a_single_task_no_stream(tmp_path):
    assert list(all_drawn(figures_of(tmp_path, {"method": "centralised_ridge"}))) == [
        "accuracy_over_tasks",
        "accuracy_matrix",
    ]
    single = [{"tasks": 1}, {"tasks": 1, "method": "afl"}]
    assert list(figures_of(tmp_path, *single)) == ["accuracy_against_bytes", "accuracy_against_seconds"]


def test_curves_are_means_over_seeds_with_a_band_of_one_deviation(tmp_path):
    runs = [{"seed": 0, "A_avg": 80.0}, {"seed": 1, "A_avg": 84.0}, {"method": "centralised_ridge", "A_avg": 90.0}]
    figure = figures_of(tmp_path, *runs, only=CURVES)["accuracy_over_tasks"]
    [axes] = figure.axes
    ceiling, mean = (line.get_ydata() for line in axes.lines)
    np.testing.assert_allclose(mean, [82, 81, 80, 79, 78])
    np.testing.assert_allclose(ceiling, [90, 89, 88, 87, 86])
    [band] = [part for part in axes.collections if isinstance(part, FillBetweenPolyCollection)]
    first = band.get_paths()[0].vertices
    first = first[first[:, 0] == 1][:, 1]
    assert np.ptp(first) == pytest.approx(2 * np.std([80, 84], ddof=1))
    assert "n = 1 to 2 seeds, without a deviation where it is 1" in caption(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["centralised_ridge (ceiling)", "fedran"]


@pytest.mark.slow
def test_devices_protocols_and_settings_have_panels_of_their_own(tmp_path):
    runs = [{"device": "cpu"}, {"device": "cuda"}, {"device": "cpu", "wire.dtype": "float16"}]
    runs += [{**run, "method": "afl"} for run in runs]
    figures = figures_of(tmp_path, *runs)
    for name in ("accuracy_over_tasks", "accuracy_against_seconds"):
        titles = {axes.get_title(loc="left") for axes in figures[name].axes}
        assert titles == {
            *("wire.dtype float32, device cpu", "wire.dtype float32, device cuda", "wire.dtype float16, device cpu"),
        }
    assert "2 more settings have no panel" in caption(figures["accuracy_matrix"])


@pytest.mark.slow_cases("beta-values1", "clients-values2", "label_rate-values0")
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


def test_a_knob_of_the_name_of_a_key_is_not_taken_for_it(tmp_path):
    runs = [{"method_beta": 0.5, "beta": beta, "A_avg": 50 + beta} for beta in (0.1, 1.0)]
    name = "accuracy_against_beta"
    figure = figures_of(tmp_path, *runs, only=[name])[name]
    assert [x for x, _ in points(figure.axes[0])[0]] == [0.1, 1.0]


def test_runs_that_differ_in_more_than_the_quantity_are_not_joined(tmp_path):
    runs = [{"beta": 0.1, "clients": 5}, {"beta": 1.0, "clients": 20}, {"beta": 0.5, "clients": 5, "device": "cuda"}]
    figures = figures_of(tmp_path, *runs)
    assert not {"accuracy_against_beta", "accuracy_against_clients"} & set(figures)


def test_a_line_for_each_width_joins_the_ranks(tmp_path):
    """Of FedRAN Fig. 6; M = 2048 was run with one rank only."""
    pairs = [*itertools.product((8, 16, 32), (64, 128)), (512, 2048)]
    runs = [{"method_rank": r, "method_M": M, "A_avg": 50.0 + r + M / 64} for r, M in pairs]
    name = "accuracy_against_rank"
    assert name not in figures_of(tmp_path, *runs[-2:], only=[name])
    figure = figures_of(tmp_path, *reversed(runs), only=[name])[name]
    assert points(figure.axes[0]) == [[(r, 50 + r + M / 64) for r in (8, 16, 32)] for M in (64, 128)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedran M=64", "fedran M=128"]


@pytest.mark.slow
def test_a_method_looks_the_same_in_every_figure(tmp_path):
    # Lines that are all flat are not drawn.
    knobs = [{"beta": beta, "A_avg": 60 + beta, "label_rate": 1.0} for beta in (0.1, 1.0)]
    runs = [{"method": method, **more} for method in ("afl", "stsa", "fedran") for more in knobs]
    figures = figures_of(tmp_path, *runs)
    for name in ("accuracy_over_tasks", "accuracy_against_bytes", "accuracy_against_seconds", "accuracy_against_beta"):
        seen = {h.get_label(): (h.get_color(), h.get_marker()) for h in figures[name].legends[0].legend_handles}
        assert {method: seen[method] for method in ("afl", "stsa", "fedran")} == {
            method: METHODS[method] for method in ("afl", "stsa", "fedran")
        }


def test_the_matrix_is_the_mean_over_seeds_with_nothing_above_the_diagonal(tmp_path):
    figure = figures_of(tmp_path, {"seed": 0, "A_avg": 60.0}, {"seed": 1, "A_avg": 80.0}, only=["accuracy_matrix"])[
        "accuracy_matrix"
    ]
    shown = np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)
    np.testing.assert_allclose(shown, np.where(np.tri(TASKS) > 0, 70, np.nan))
    assert [text.get_text() for text in figure.axes[0].texts] == ["70"] * (TASKS * (TASKS + 1) // 2)


@pytest.mark.slow
def test_real_runs_are_drawn_as_recorded(tmp_path):
    folder = real_runs(tmp_path) / "runs"
    frame = collect(folder)
    figure = figure_set(frame, folder, CURVES)["accuracy_over_tasks"]
    recorded = [json.loads((folder / name / "run.json").read_text())["metrics"]["accuracy"] for name in frame["folder"]]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), np.mean(recorded, axis=0))


@pytest.mark.slow
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
    uploads = pd.DataFrame(rows, columns=columns).assign(stage="model")
    # A first stage's exchanges come before, under the numbers of the first task and of its rounds.
    pd.concat([uploads.assign(stage="adaptation"), uploads]).to_csv(folder / "uploads.csv", index=False)
    tasks = {"task": [0], "accuracy": [accuracies[-1]], "server_seconds": [0.5 * len(accuracies)]}
    pd.DataFrame(tasks).to_csv(folder / "tasks.csv", index=False)
    if tested:
        measured = {"task": [0 for _ in rounds], "round": rounds, "accuracy": accuracies}
        pd.DataFrame(measured).to_csv(folder / "rounds.csv", index=False)


@pytest.mark.slow
def test_rounds_are_drawn_against_rounds_upload_and_seconds(tmp_path):
    trained = {"method": "fedavg", "tasks": 1}
    frame = made_up(
        {**trained, "A_T_best": 60.0},
        {**trained, "A_T_best": 62.0, "seed": 1},
        {"method": "afl", "tasks": 1},
        {"method": "centralised_ridge", "tasks": 1},
    )
    frame = frame.assign(folder=frame["run_id"], adapt="fedavg")
    for run, accuracies in zip(frame["run_id"], ([10.0, 60.0, 50.0], [14.0, 62.0, 58.0], [70.0], [80.0]), strict=True):
        trained_for_rounds(tmp_path / run, accuracies, tested=len(accuracies) > 1)
    figure = all_drawn(figure_set(frame, tmp_path))["accuracy_over_rounds"]
    over_rounds, over_upload, over_seconds = figure.axes
    afl, centralised, fedavg = ([tuple(point) for point in line.get_xydata()] for line in over_rounds.lines)
    assert centralised == [(0, 80.0), (1, 80.0)]
    assert "Without the first stages." in caption(figure)
    assert fedavg == [(1, 12.0), (2, 61.0), (3, 54.0)]
    assert afl == [(1, 70.0)]
    # The busiest client's 2 MiB each round; the clients' mean of 2 s and half a second of the server's.
    assert list(over_upload.lines[2].get_xdata()) == [2, 4, 6]
    assert list(over_seconds.lines[2].get_xdata()) == [2.5, 5, 7.5]
    # Plain numbers, which lie apart.
    for axes in figure.axes:
        names = [tick for tick in axes.get_xticklabels(which="both") if tick.get_text()]
        assert names
        assert all(float(tick.get_text()) > 0 for tick in names)
        ends = [tick.get_window_extent() for tick in names]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(sorted(ends, key=lambda end: end.x0)))


def test_a_pages_charts_have_curves_over_rounds_where_any_run_was_tested_within_its_tasks(tmp_path, monkeypatch):
    trained, others = {"method": "fedavg", "A_T_best": 60.0}, ("afl", "centralised_ridge")
    frame = made_up(trained, {**trained, "seed": 1}, *({"method": name} for name in others)).assign(tasks=1, gates="")
    frame = frame.assign(path=[str(tmp_path / run) for run in frame["run_id"]])
    curves = ([10.0, 60.0, 50.0], [14.0, 62.0, 58.0], [70.0], [80.0])
    for path, accuracies in zip(map(Path, frame["path"]), curves, strict=True):
        trained_for_rounds(path, accuracies, tested=len(accuracies) > 1)
        (path / "run.json").write_text(json.dumps({"metrics": {"accuracy": accuracies[-1:]}}))
        (path / "accuracy_matrix.csv").write_text(f"task0\n{accuracies[-1]}\n")
    summary = summarise(used_runs(frame))
    found = {row["name"]: row.get("rounds") for row in chart_rows(summary)}
    whole = [[1, 12.0, 2.828], [2, 61.0, 1.414], [3, 54.0, 5.657]]
    assert found == {"fedavg": whole, "afl": [[1, 70.0, None]], "centralised_ridge": None}
    monkeypatch.setattr("fcl_bench.results.figures.curves._MOST_TESTS", 2)
    assert [row["rounds"] for row in chart_rows(summary) if row["name"] == "fedavg"] == [[whole[0], whole[-1]]]


@pytest.mark.slow
def test_seeds_tested_at_other_rounds_than_the_first_are_left_out(tmp_path):
    trained = {"method": "fedavg", "tasks": 1, "A_T_best": 60.0}
    frame = made_up({**trained, "evaluate_rounds": 1}, {**trained, "evaluate_rounds": 2, "seed": 1})
    frame = frame.assign(folder=frame["run_id"])
    for run in frame["run_id"]:
        trained_for_rounds(tmp_path / run, [10.0, 60.0, 20.0, 50.0], tested=True)
    every_second = pd.read_csv(tmp_path / "run1" / "rounds.csv").iloc[1::2]
    every_second.assign(accuracy=[70.0, 58.0]).to_csv(tmp_path / "run1" / "rounds.csv", index=False)
    figure = all_drawn(figure_set(frame, tmp_path, ["accuracy_over_rounds"]))["accuracy_over_rounds"]
    [line] = figure.axes[0].lines
    assert [tuple(point) for point in line.get_xydata()] == [(1, 10.0), (2, 60.0), (3, 20.0), (4, 50.0)]


def test_upload_counts_up_for_each_client_and_over_tasks(tmp_path):
    """Of two clients that take turns, neither has sent what both have."""
    rows = [(0, 0, 0, 2**20), (0, 1, 1, 2**20), (1, 0, 0, 2**21)]
    uploads = pd.DataFrame(rows, columns=["task", "round", "client", "up_bytes"])
    uploads = uploads.assign(client_seconds=0.0, stage="model")
    uploads.to_csv(tmp_path / "uploads.csv", index=False)
    tasks = pd.DataFrame({"task": [0, 1], "accuracy": [50.0, 40.0], "server_seconds": [0.0, 1.0]})
    tasks.to_csv(tmp_path / "tasks.csv", index=False)
    found = progress(tmp_path)
    assert found[["rounds", "mib", "seconds", "accuracy"]].to_numpy().tolist() == [[2, 1, 0, 50], [3, 3, 1, 40]]


def test_without_rounds_that_were_tested_there_is_no_such_figure(tmp_path):
    assert "accuracy_over_rounds" not in figures_of(tmp_path, {})


@pytest.mark.slow
def test_panels_of_accuracy_share_an_axis_that_never_leaves_0_to_100(tmp_path):
    runs = [
        {"method": m, "beta": b, "A_avg": a, "seed": s}
        for m, b, a in (("stsa", 0.1, 99.9), ("afl", 1.0, 40.0))
        for s in (0, 1)
    ]
    runs[0]["A_avg"] = 100.0
    runs += [{"method": "fedran", "beta": b, "A_avg": 3.0} for b in (0.1, 1.0)]
    seen = 0
    for figure in figures_of(tmp_path, *runs).values():
        by_axis = {}
        for axes in figure.axes:
            if "%" in axes.get_ylabel() and axes.get_label() != "<colorbar>":
                by_axis.setdefault(axes.get_ylabel(), set()).add(axes.get_ylim())
        for limits in by_axis.values():
            [(low, high)] = limits
            assert 0 <= low < high <= 100
            seen += 1
    assert seen > 2


def test_coinciding_lines_are_named_and_the_lower_one_is_wider(tmp_path):
    runs = [{"method": "afl"}, {"method": "afcl", "A_avg": 80.04}, {"method": "stsa", "A_avg": 81.0}]
    figure = figures_of(tmp_path, *runs, only=CURVES)["accuracy_over_tasks"]
    widths = [line.get_linewidth() for line in figure.axes[0].lines]
    assert widths[0] > widths[1] == widths[2]
    assert "Within 0.05 points of each other, the thinner line above: afcl and afl." in caption(figure)


def test_what_the_user_says_shares_a_panel(tmp_path):
    runs = [
        {"method": "stsa", "features": "one"},
        {"method": "l2p", "features": "two"},
        {"method": "l2p", "features": "one"},
    ]
    frame = made_up(*runs)
    figures_of(tmp_path, *runs, only=())
    frame = frame.assign(folder=frame["run_id"])
    assert len(figure_set(frame, tmp_path, CURVES)["accuracy_over_tasks"].axes) == 2
    figure = figure_set(split_by_setting(frame, ["features"]), tmp_path, CURVES)["accuracy_over_tasks"]
    assert len(figure.axes) == 1
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["l2p features=one", "l2p features=two", "stsa"]
    with pytest.raises(UserError, match="--together featurs is no key of the setting .did you mean features"):
        split_by_setting(frame, ["featurs"])


def test_lines_that_the_quantity_does_not_move_are_named_and_alone_they_are_no_figure(tmp_path):
    flat = [
        {"method": "afl", "beta": beta, "data": data, "A_T": 70.0 + len(data)} for beta in (0.1, 1.0) for data in "ab"
    ]
    moved = [{"method": "fedavg", "beta": beta, "A_T": 60.0 + beta, "data": "a"} for beta in (0.1, 1.0)]
    only = ["accuracy_against_beta"]
    assert figures_of(tmp_path, *flat, only=only) == {}
    told = caption(figures_of(tmp_path, *flat, *moved, only=only)["accuracy_against_beta"])
    assert "Flat, since beta does not change their accuracy: afl." in told
    assert "Flat" not in caption(figures_of(tmp_path, *moved, only=only)["accuracy_against_beta"])
