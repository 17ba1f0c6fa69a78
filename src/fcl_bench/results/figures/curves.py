"""Figures over the stream: accuracy after each task and round (coinciding curves stay visible), and matrices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fcl_bench.config import text
from fcl_bench.execution.pictures import matrix_panel
from fcl_bench.results.figures.canvas import Drawing, canvas, caption, drawing, title
from fcl_bench.results.figures.costs import log_costs
from fcl_bench.results.figures.selection import Look, Panel, select
from fcl_bench.results.reference import is_own
from fcl_bench.results.summarise import CEILINGS, signature, varying_setting
from fcl_bench.results.tables.sections import ALWAYS_APART

#: Accuracies closer than this many points look alike at any size.
ALIKE = 0.05
_BAND = "Line: mean over seeds; band: one standard deviation either way."
#: How much wider each coinciding line is than the next one above it, and how much larger its markers are, in points.
_WIDER, _LARGER = 2.0, 3.5
#: How many tests of a row a page has.
_MOST_TESTS = 200


def accuracies(runs: Sequence[str], folders: Mapping[str, Path]) -> np.ndarray:
    """Return (runs, T): [A_1..A_T] of each run in percent, NaN where a task has no test sample."""
    records = [json.loads((folders[run] / "run.json").read_text()) for run in runs]
    return np.array([record["metrics"]["accuracy"] for record in records], dtype=float)


def mean_matrix(runs: Sequence[str], folders: Mapping[str, Path]) -> np.ndarray:
    """Return (T, T): the mean over runs of a[t, tau] in percent, NaN above the diagonal."""
    files = [folders[run] / "accuracy_matrix.csv" for run in runs]
    return np.mean([pd.read_csv(file).to_numpy(float) for file in files], axis=0)


def chart_rows(summary: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what a page's charts show of each row of a summary beside its table; null where there is no value.

    Several rows of a summary have one `row` of the table if they differ in nothing but `ALWAYS_APART`.
    """
    varying = varying_setting(summary)
    apart = [key for key in ALWAYS_APART if key in varying]
    places = pd.factorize(signature(summary, ["label", *(key for key in varying if key not in apart)]))[0]
    has_rounds = summary["A_T_best_mean"].notna().any()
    found = []
    for place, own, row in zip(places, is_own(summary), summary.to_dict("records"), strict=True):
        name, is_ceiling = ", ".join([row["label"], *(text(row[key]) for key in apart)]), row["method"] in CEILINGS
        entry = {"row": int(place), "name": name, "ceiling": is_ceiling, "gated": bool(row["gates"])}
        if own:
            folders = dict(zip(row["run_ids"], map(Path, row["folders"]), strict=True))
            curves, matrix = accuracies(row["run_ids"], folders), mean_matrix(row["run_ids"], folders)
            numbers = {"curve": curves.mean(axis=0), "spread": _deviation(curves), "matrix": matrix}
            numbers |= {"rounds": _over_rounds([*folders.values()])} if has_rounds and not is_ceiling else {}
            entry |= {key: np.where(np.isnan(v), np.array(None), v.round(3)).tolist() for key, v in numbers.items()}
        found.append(entry)
    return found


def _deviation(curves: np.ndarray) -> np.ndarray:
    """Return (n,) the standard deviation over runs of their curves (runs, n); NaN for a single run."""
    return curves.std(axis=0, ddof=1) if len(curves) > 1 else np.full(curves.shape[1], np.nan)


def _over_rounds(folders: Sequence[Path]) -> np.ndarray:
    """Return (n, 3): rounds so far, mean accuracy and its standard deviation at each test, `_MOST_TESTS` at most."""
    runs = _alike([progress(folder) for folder in folders])
    curves = np.array([run["accuracy"].to_numpy(float) for run in runs])
    numbers = np.stack([runs[0]["rounds"].to_numpy(float), curves.mean(axis=0), _deviation(curves)], axis=1)
    return numbers[np.unique(np.linspace(0, len(numbers) - 1, _MOST_TESTS).round().astype(int))]


def coinciding(curves: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Return groups of two or more names whose curves are everywhere within `ALIKE` points of the first one's."""
    groups: list[list[str]] = []
    for name, curve in curves.items():
        for group in groups:
            first = curves[group[0]]
            if first.shape == curve.shape and np.allclose(first, curve, rtol=0, atol=ALIKE, equal_nan=True):
                group.append(name)
                break
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1]


def _wider(look: Look, above: int) -> Look:
    """Return the look of a line with `above` others drawn on it."""
    width, size = look.get("linewidth", 1.5), look.get("markersize", 6.0)
    wider = {"linewidth": width + _WIDER * above, "alpha": 0.6} if above else {}
    return {**look, **wider, **({"markersize": size + _LARGER * above} if above and "marker" in look else {})}


_CURVE_COLUMNS, _MATRIX_COLUMNS = 2, 3
_MOST_MATRICES = 8


def accuracy_over_tasks(summary: pd.DataFrame, folders: Mapping[str, Path]) -> Drawing:
    """Draw one panel per setting: mean over seeds of A_t, on all classes seen up to task t, with one deviation's band.

    Coinciding lines are drawn on each other from the widest to the thinnest, so that each can be seen.

    Args:
        summary: the result of `summarise`.
        folders: run id -> its folder.
    """
    shown = select(summary)
    alike: list[str] = []

    def draw(axes: Axes, panel: Panel) -> None:
        runs = {row["label"]: accuracies(row["run_ids"], folders) for _, row in panel.rows.iterrows()}
        groups = coinciding({label: curves.mean(axis=0) for label, curves in runs.items()})
        alike.extend(" and ".join(group) for group in groups)
        above = {label: len(group) - 1 - place for group in groups for place, label in enumerate(group)}
        for label, curves in runs.items():
            look, middle, tasks = shown.looks[label], curves.mean(axis=0), np.arange(1, curves.shape[1] + 1)
            axes.plot(tasks, middle, **_wider(look, above.get(label, 0)))
            draw_band(axes, tasks, curves, look)
        axes.set_xlabel("task")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("accuracy, $A_t$ (%)")

    about = ["Accuracy on all classes seen so far, after each task.", _BAND]
    figure = drawing(shown, about, [draw], _CURVE_COLUMNS)
    if alike:
        which = "; ".join(dict.fromkeys(alike))
        remark = f"Within {ALIKE:g} points of each other, the thinner line above: {which}."
        figure.caption = caption(figure.caption, remark)
    return figure


def draw_band(axes: Axes, at: np.ndarray, curves: np.ndarray, look: Look) -> None:
    """Draw the mean of several runs' curves (runs, n) plus and minus one standard deviation; of one run, nothing."""
    if len(curves) > 1:
        middle, spread = curves.mean(axis=0), curves.std(axis=0, ddof=1)
        axes.fill_between(at, middle - spread, middle + spread, color=look["color"], alpha=0.18, linewidth=0)


def accuracy_matrices(summary: pd.DataFrame, folders: Mapping[str, Path]) -> Drawing:
    """Draw one heat map per configuration of the setting with the most: mean over seeds of a[t, tau] in percent.

    Args:
        summary: the result of `summarise`, for streams of two tasks or more.
        folders: run id -> its folder.
    """
    shown = select(summary, most_panels=1, most_lines=_MOST_MATRICES)
    figure, grid = canvas(len(shown.rows), _MATRIX_COLUMNS, height=3.4)
    what = "Accuracy (%) on the test samples of each task (column), after each task (row). Mean over seeds."
    figure.caption = caption(what, *shown.notes)
    means = [mean_matrix(runs, folders) for runs in shown.rows["run_ids"]]
    low, high = min(map(np.nanmin, means)), max(map(np.nanmax, means))
    for axes, matrix, label in zip(grid, means, shown.rows["label"], strict=True):
        image = matrix_panel(axes, matrix, low, high)
        title(axes, label, min(_MATRIX_COLUMNS, len(means)) + 1)
    shrink = 0.8 if len(means) <= _MATRIX_COLUMNS else 0.5
    figure.colorbar(image, ax=grid, label="accuracy (%)", shrink=shrink, pad=0.01)
    return figure


_MOST_PANELS = 4
#: The stage of a first stage's exchanges, which tables count apart, too.
_FIRST_STAGE = "adaptation"
#: Column of `progress` -> the label of its axis.
_AXES = {
    "rounds": "rounds of exchange so far",
    "mib": "upload of the busiest client (MiB)",
    "seconds": "seconds: clients' mean and server",
}


def accuracy_over_rounds(summary: pd.DataFrame, folders: Mapping[str, Path]) -> Drawing:
    """Draw one row of panels per setting: accuracy on all classes so far against rounds, upload and seconds (log axes).

    A run that was not tested within its tasks (`evaluate_rounds=0`), such as one of a closed-form method, has one point
    per task; a ceiling is a line at its final accuracy. Of one line's runs, those that were tested at other rounds than
    the first are left out.

    Args:
        summary: the result of `summarise`.
        folders: run id -> its folder.
    """
    shown = select(summary, most_panels=_MOST_PANELS)
    rows = shown.rows
    curves = {ids: _alike([progress(folders[run]) for run in ids]) for ids in map(tuple, rows["run_ids"])}
    rivals = [run for ids in rows.loc[~rows["method"].isin(CEILINGS), "run_ids"] for run in curves[tuple(ids)]]
    sizes = {quantity: pd.Series([size for run in rivals for size in run[quantity]], dtype=float) for quantity in _AXES}

    def draw(quantity: str, axes: Axes, panel: Panel) -> None:
        for label, method, ids in zip(*(panel.rows[key] for key in ("label", "method", "run_ids")), strict=True):
            runs = curves[tuple(ids)]
            accuracy = np.array([run["accuracy"].to_numpy(float) for run in runs])
            middle = accuracy.mean(axis=0)
            if method in CEILINGS:
                # A ceiling has all data in one place, so its bytes and seconds are not comparable.
                axes.axhline(middle[-1], **shown.looks[label])
                continue
            at = np.mean([run[quantity].to_numpy(float) for run in runs], axis=0)
            # A dozen markers on a long curve, not one per round.
            axes.plot(at, middle, **shown.looks[label], markevery=max(1, len(at) // 12))
            draw_band(axes, at, accuracy, shown.looks[label])
        log_costs(axes, sizes[quantity])
        axes.set_xlabel(_AXES[quantity])
        axes.set_ylabel("accuracy (%)")

    about = [
        "Accuracy on all classes seen so far, while it is learnt; test data chose none of these rounds.",
        "The server's seconds of a task are spread evenly over its rounds.",
        "Without the first stages." if "adapt" in rows and set(rows["adapt"]) - {"none"} else "",
        _BAND,
    ]
    return drawing(shown, about, [partial(draw, quantity) for quantity in _AXES], height=3.4)


def progress(folder: Path) -> pd.DataFrame:
    """Return a run's `accuracy` at each test, with its `rounds`, `mib` and `seconds` since the method's start.

    Args:
        folder: the run's folder.
    """
    uploads = pd.read_csv(folder / "uploads.csv")
    uploads = uploads[uploads["stage"] != _FIRST_STAGE]
    tasks = pd.read_csv(folder / "tasks.csv").set_index("task")
    rounds = uploads.groupby(["task", "round"], as_index=False).agg(seconds=("client_seconds", "mean"))
    share = tasks["server_seconds"] / rounds.groupby("task").size()
    rounds["seconds"] += rounds["task"].map(share)
    sent = uploads.pivot_table(
        index=["task", "round"], columns="client", values="up_bytes", aggfunc="sum", fill_value=0
    )
    rounds = rounds.assign(
        rounds=np.arange(1, len(rounds) + 1),
        mib=sent.cumsum().max(axis=1).to_numpy() / 2**20,
        seconds=rounds["seconds"].cumsum(),
    )
    if (folder / "rounds.csv").exists():
        tested = pd.read_csv(folder / "rounds.csv")
    else:
        tested = tasks["accuracy"].reset_index().assign(round=rounds.groupby("task")["round"].max().to_numpy())
    return tested.merge(rounds, on=["task", "round"], how="left", validate="one_to_one")


def _alike(runs: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Return the runs that were tested where the first was; a mean needs a value of every run."""
    tested = [run[["task", "round"]] for run in runs]
    return [run for run, own in zip(runs, tested, strict=True) if own.equals(tested[0])]
