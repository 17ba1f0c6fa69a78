"""Every figure that a set of runs has enough for."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from fcl_bench.results.figures.costs import COSTS, accuracy_against_cost
from fcl_bench.results.figures.ranks import grids, rank_by_width
from fcl_bench.results.figures.rounds import accuracy_over_rounds
from fcl_bench.results.figures.sweeps import SWEPT, accuracy_against, swept
from fcl_bench.results.figures.tasks import accuracy_matrices, accuracy_over_tasks
from fcl_bench.results.summarise import CEILINGS, summarise, used_runs


def figure_set(runs: pd.DataFrame, folder: Path) -> dict[str, Figure]:
    """Name -> figure, in the order to read them; only those for which there are runs.

    `accuracy_over_tasks` and `accuracy_matrix` want streams of two tasks or more; `accuracy_over_rounds` a run that was
    tested within its tasks; `accuracy_against_bytes` and
    `accuracy_against_seconds` a run that is no ceiling; `rank_by_M` one configuration at two ranks and two widths;
    `accuracy_against_label_rate`, `_beta`, `_clients` and `_epsilon` one that was run at two values, all else equal.

    Args:
        runs: what `collect` returned, after selection; of repeated runs only the newest counts.
        folder: runs/, which holds the folders named there.
    """
    if runs.empty:
        return {}
    runs = used_runs(runs)
    summary = summarise(runs)
    folders = {run: folder / name for run, name in zip(runs["run_id"], runs["folder"], strict=True)}
    figures: dict[str, Figure] = {}
    streams = summary[summary["tasks"].astype(int) > 1]
    if len(streams):
        figures["accuracy_over_tasks"] = accuracy_over_tasks(streams, folders)
    if summary["A_T_best_mean"].notna().any():
        figures["accuracy_over_rounds"] = accuracy_over_rounds(summary, folders)
    if not summary["method"].isin(CEILINGS).all():
        figures |= {f"accuracy_against_{cost}": accuracy_against_cost(summary, cost) for cost in COSTS}
    if found := grids(summary):
        figures["rank_by_M"] = rank_by_width(found)
    for quantity in SWEPT:
        rows = swept(summary, quantity)
        if len(rows):
            figures[f"accuracy_against_{quantity.removeprefix('noise.')}"] = accuracy_against(rows, quantity)
    if len(streams):
        figures["accuracy_matrix"] = accuracy_matrices(streams, folders)
    return figures
