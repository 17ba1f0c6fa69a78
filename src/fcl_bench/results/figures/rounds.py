"""Accuracy while a model is trained, against rounds, uploaded bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fcl_bench.results.figures.canvas import Drawing, drawing
from fcl_bench.results.figures.costs import log_costs
from fcl_bench.results.figures.selection import Panel, select
from fcl_bench.results.summarise import CEILINGS

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
            if len(runs) > 1 and len(at) > 1:
                spread, colour = accuracy.std(axis=0, ddof=1), shown.looks[label]["color"]
                axes.fill_between(at, middle - spread, middle + spread, color=colour, alpha=0.15, linewidth=0)
        log_costs(axes, sizes[quantity])
        axes.set_xlabel(_AXES[quantity])
        axes.set_ylabel("accuracy (%)")

    about = [
        "Accuracy on all classes seen so far, while it is learnt; test data chose none of these rounds.",
        "The server's seconds of a task are spread evenly over its rounds.",
        "Without the first stages." if "adapt" in rows and set(rows["adapt"]) - {"none"} else "",
        "Line: mean over seeds; band: one standard deviation either way.",
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
