"""The data of the page's interactive charts, and the library that draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from fcl_bench.config import text
from fcl_bench.results.figures.curves import accuracies, mean_matrix
from fcl_bench.results.figures.selection import styles
from fcl_bench.results.figures.style import SYMBOLS, Marker
from fcl_bench.results.reference import is_own
from fcl_bench.results.summarise import varying_setting

#: What Plotly adds to the name of a symbol that has an inside, for each way of filling it.
_FILLINGS = {"none": "-open", "full": "", "left": "-open-dot", "bottom": "-dot"}
#: Symbols that Plotly draws without a dot inside; variants of their methods differ in dashes alone.
_NO_DOT = ("circle-cross", "circle-x", "square-cross", "square-x", "diamond-cross", "diamond-x", "hourglass", "bowtie")
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}


def library() -> str | None:
    """Return the source of plotly.js, which the package plotly contains; None if that is not installed."""
    if find_spec("plotly") is None:
        return None
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def chart_data(summary: pd.DataFrame, folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return one entry per row of the summary: name, setting, look, curve, costs and matrix, null where there is none.

    Args:
        summary: the result of `summarise`.
        folders: run id -> its folder; reference runs have none, so they have neither curve nor matrix.
    """
    keys = varying_setting(summary)
    looks = styles(summary)
    return [
        {
            "name": row["label"],
            "method": row["method"],
            "setting": {key: text(row[key]) or "none" for key in keys},
            "look": _look(looks[row["label"]]),
            "n": int(row["n"]),
            "gates": row["gates"],
            "bytes": _number(row["up_max_mib_mean"]),
            "seconds": _number(row["seconds_per_task_mean"]),
            "A_avg": _number(row["A_avg_mean"]),
            "A_avg_std": _number(row["A_avg_std"]),
            **(_series(row["run_ids"], folders) if own else {"accuracy": [], "accuracy_std": None, "matrix": []}),
        }
        for (_, row), own in zip(summary.iterrows(), is_own(summary), strict=True)
    ]


def _series(runs: list[str], folders: Mapping[str, Path]) -> dict[str, Any]:
    curves = accuracies(runs, folders)
    spread = curves.std(axis=0, ddof=1) if len(curves) > 1 else None
    matrix = mean_matrix(runs, folders)
    return {
        "accuracy": [_number(value) for value in curves.mean(axis=0)],
        "accuracy_std": None if spread is None else [_number(value) for value in spread],
        "matrix": [[_number(value) for value in row] for row in matrix],
    }


def _look(look: Mapping[str, Any]) -> dict[str, str]:
    """Return a line's look in Plotly's terms; Matplotlib writes grey as a number in a text. Ceilings have no marker."""
    dash = look["linestyle"]
    return {
        "color": look["color"] if look["color"].startswith("#") else "#777777",
        "symbol": _symbol(look["marker"], look["fillstyle"]) if "marker" in look else "",
        "dash": _DASHES.get(dash, "longdashdot") if isinstance(dash, str) else "longdashdot",
    }


def _symbol(marker: Marker, filling: str) -> str:
    name = SYMBOLS[marker]
    if name.endswith("-open"):
        return name
    added = _FILLINGS[filling]
    return name + (added.replace("-dot", "") if name in _NO_DOT else added)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)
