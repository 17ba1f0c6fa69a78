"""The data of the page's interactive charts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fcl_bench.config import text
from fcl_bench.results.figures.curves import accuracies, mean_matrix
from fcl_bench.results.reference import is_own
from fcl_bench.results.summarise import CEILINGS, varying_setting


def chart_data(summary: pd.DataFrame, folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return one entry per row of the summary: name, setting, curve, costs and matrix, null where there is none.

    Args:
        summary: the result of `summarise`.
        folders: run id -> its folder; reference runs have none, so they have neither curve nor matrix.
    """
    keys = varying_setting(summary)
    return [
        {
            "name": row["label"],
            "setting": {key: text(row[key]) or "none" for key in keys},
            "ceiling": row["method"] in CEILINGS,
            "n": int(row["n"]),
            "gates": row["gates"],
            "bytes": _number(row["up_max_mib_mean"]),
            "A_avg": _number(row["A_avg_mean"]),
            "A_avg_std": _number(row["A_avg_std"]),
            **(_series(row["run_ids"], folders) if own else {"accuracy": [], "matrix": []}),
        }
        for (_, row), own in zip(summary.iterrows(), is_own(summary), strict=True)
    ]


def _series(runs: list[str], folders: Mapping[str, Path]) -> dict[str, Any]:
    return {
        "accuracy": [_number(value) for value in accuracies(runs, folders).mean(axis=0)],
        "matrix": [[_number(value) for value in row] for row in mean_matrix(runs, folders)],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)
