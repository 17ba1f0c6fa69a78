"""Every figure that a set of runs has enough for."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from fcl_bench.results.figures.bytes_figure import accuracy_against_bytes
from fcl_bench.results.figures.matrix_figure import accuracy_matrices_figure
from fcl_bench.results.figures.rank_figure import grids, rank_by_width
from fcl_bench.results.figures.seconds_figure import accuracy_against_seconds
from fcl_bench.results.figures.style import CEILINGS
from fcl_bench.results.figures.sweep_figure import SWEPT, accuracy_against, swept
from fcl_bench.results.figures.task_figure import accuracy_over_tasks
from fcl_bench.results.summarise import summarise, used_runs


def figure_set(runs: pd.DataFrame, folder: Path) -> dict[str, Figure]:
    """Name -> figure, in the order to read them; only those for which there are runs.

    `accuracy_over_tasks` and `accuracy_matrix` want streams of two tasks or more; `accuracy_against_bytes` and
    `accuracy_against_seconds` a run that is no ceiling; `rank_by_M` one configuration at two ranks and two widths;
    `accuracy_against_label_rate`, `_beta` and `_clients` one that was run at two values, all else being equal.

    Args:
        runs: what `collect` returned, after selection; of repeated runs only the newest counts.
        folder: runs/, which holds the folders named there.
    """
    if runs.empty:
        return {}
    runs = used_runs(runs)
    summary = summarise(runs)
    folders = dict(zip(runs["run_id"], runs["folder"], strict=True))
    figures: dict[str, Figure] = {}

    def folder_of(run: str) -> Path:
        return folder / folders[run]

    streams = summary[summary["tasks"].astype(int) > 1]
    if len(streams):
        figures["accuracy_over_tasks"] = accuracy_over_tasks(streams, folder_of)
    if not summary["method"].isin(list(CEILINGS)).all():
        figures["accuracy_against_bytes"] = accuracy_against_bytes(summary)
        figures["accuracy_against_seconds"] = accuracy_against_seconds(summary)
    found = grids(summary)
    if found:
        figures["rank_by_M"] = rank_by_width(found)
    for quantity in SWEPT:
        rows = swept(summary, quantity)
        if len(rows):
            figures[f"accuracy_against_{quantity}"] = accuracy_against(rows, quantity)
    if len(streams):
        figures["accuracy_matrix"] = accuracy_matrices_figure(streams, folder_of)
    return figures
