"""Makes every figure for which a set of runs is sufficient."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pandas as pd

from fcl_bench.results.figures.canvas import Drawing
from fcl_bench.results.figures.costs import COSTS, accuracy_against_cost, compared
from fcl_bench.results.figures.rounds import accuracy_over_rounds
from fcl_bench.results.figures.sweeps import SWEPT, accuracy_against, swept
from fcl_bench.results.figures.tasks import accuracy_matrices, accuracy_over_tasks
from fcl_bench.results.reference import is_own
from fcl_bench.results.summarise import summarise, used_runs


def _name(quantity: str) -> str:
    """Return the name of the figure of accuracy against a quantity that was varied."""
    return f"accuracy_against_{quantity.removeprefix('noise.')}"


#: All figures, in reading order.
FIGURES = (
    *("accuracy_over_tasks", "accuracy_over_rounds"),
    *(f"accuracy_against_{cost}" for cost in COSTS),
    *map(_name, SWEPT),
    "accuracy_matrix",
)


def figure_set(
    runs: pd.DataFrame, folder: Path, wanted: Collection[str] = FIGURES, reference: str = ""
) -> dict[str, Drawing]:
    """Return name -> figure, in the order of `FIGURES`; only figures for which there are runs.

    `accuracy_over_tasks` and `accuracy_matrix` need streams of two tasks or more; `accuracy_over_rounds` needs a
    configuration whose runs were all tested within their tasks; `accuracy_against_bytes` and `accuracy_against_seconds`
    need two configurations in one setting, not counting ceilings;
    `accuracy_against_rank`, `_label_rate`, `_beta`, `_clients` and `_epsilon` need one configuration that was run at
    two values, all else equal.

    Reference runs have no folder, so they have no curve and no matrix: the first two and `accuracy_matrix` leave them
    out.

    Args:
        runs: the result of `collect` or `beside`, after selection; of repeated runs only the newest counts.
        folder: the folder runs/, which holds the runs' folders.
        wanted: names of `FIGURES`; no other figure is drawn.
        reference: the configuration that is subtracted from curves over tasks; "" for none.

    Raises:
        UserError: the reference matches no configuration of these runs, or several in one panel.
    """
    if runs.empty:
        return {}
    given, runs = runs, used_runs(runs)
    summary = summarise(runs)
    folders = {run: folder / name for run, name in zip(runs["run_id"], runs["folder"], strict=True) if name}
    with_curves = summary[is_own(summary)]
    streams = with_curves[with_curves["tasks"].astype(int) > 1]
    ways: dict[str, Callable[[], Drawing]] = {}
    if len(streams):
        ways["accuracy_over_tasks"] = partial(accuracy_over_tasks, streams, folders, reference)
        ways["accuracy_matrix"] = partial(accuracy_matrices, streams, folders)
    tested = set(runs.loc[runs["A_T_best"].notna(), "run_id"])
    if any(tested.issuperset(ids) for ids in with_curves["run_ids"]):
        ways["accuracy_over_rounds"] = partial(accuracy_over_rounds, with_curves, folders)
    for cost, (measure, *_) in COSTS.items():
        if len(rivals := compared(summary[summary[f"{measure}_mean"].notna()])):
            ways[f"accuracy_against_{cost}"] = partial(accuracy_against_cost, rivals, cost)
    for quantity in (one for one in SWEPT if _name(one) in wanted):
        knob, whole = f"method.{quantity}", summary
        if knob in given and quantity not in given:
            # Like a key of the setting: labels leave it out, so that a line joins its values.
            used = given[given["run_id"].isin(runs["run_id"])]
            whole = summarise(used_runs(used.rename(columns={knob: quantity})))
        if len(rows := swept(whole, quantity)):
            ways[_name(quantity)] = partial(accuracy_against, rows, quantity)
    return {name: ways[name]() for name in FIGURES if name in ways and name in wanted}
