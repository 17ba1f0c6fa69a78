"""The picture of what accuracy costs in time."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from fcl_bench.results.figures.cost_figure import accuracy_against_cost


def accuracy_against_seconds(summary: pd.DataFrame) -> Figure:
    """A_avg and A_T against seconds a task (FedRAN Eq. 1, without feature extraction), with the Pareto front.

    Args:
        summary: what `summarise` returned; kinds of devices are settings of their own.
    """
    told = [
        "Accuracy against time, as measured: it compares only runs of one machine under one load.",
        "Pareto front: nothing else is as fast and more accurate.",
    ]
    axis = "seconds per task: clients' mean and server (FedRAN Eq. 1)"
    return accuracy_against_cost(summary, "seconds_per_task", axis, told, annotate=False)
