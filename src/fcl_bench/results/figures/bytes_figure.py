"""The picture of a summary: what accuracy costs in uploaded bytes."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from fcl_bench.results.figures.cost_figure import accuracy_against_cost


def accuracy_against_bytes(summary: pd.DataFrame) -> Figure:
    """A_avg and A_T against the measured upload of the busiest client and task, with the Pareto front.

    Args:
        summary: what `summarise` returned.
    """
    told = [
        "Accuracy against what is sent, measured.",
        "Pareto front: nothing else sends as little and is more accurate.",
    ]
    return accuracy_against_cost(summary, "up_max_mib", "upload of the busiest client and task (MiB)", told)
