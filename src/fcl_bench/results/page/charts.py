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
from fcl_bench.results.figures.style import METHODS
from fcl_bench.results.summarise import varying_setting

#: Plotly's name of each marker; a star or an asterisk that is given by numbers is one of the last two.
_SYMBOLS = {
    **{"o": "circle", "s": "square", "^": "triangle-up", "v": "triangle-down", "<": "triangle-left"},
    **{">": "triangle-right", "D": "diamond", "d": "diamond-tall", "P": "cross", "X": "x", "p": "pentagon"},
    **{"h": "hexagon", "H": "hexagon2", "8": "octagon", "*": "star"},
    **{"1": "y-down-open", "2": "y-up-open", "3": "y-left-open", "4": "y-right-open"},
}
_STAR, _ASTERISK = "hexagram", "asterisk-open"
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
        folders: run id -> its folder.
    """
    keys = varying_setting(summary)
    looks = styles(summary)
    return [
        {
            "name": row["label"],
            "method": row["method"],
            "setting": {key: text(row[key]) or "none" for key in keys},
            "look": _look(looks[row["label"]], row["method"]),
            "n": int(row["n"]),
            "bytes": _number(row["up_max_mib_mean"]),
            "seconds": _number(row["seconds_per_task_mean"]),
            "A_avg": _number(row["A_avg_mean"]),
            "A_avg_std": _number(row["A_avg_std"]),
            **_series(row["run_ids"], folders),
        }
        for _, row in summary.iterrows()
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


def _look(look: Mapping[str, Any], method: str) -> dict[str, str]:
    """Return a line's look in Plotly's terms; Matplotlib writes grey as a number in a text."""
    marker = METHODS[method][1] if method in METHODS else look.get("marker", "o")
    named = _SYMBOLS.get(marker) if isinstance(marker, str) else _STAR if marker[1] == 1 else _ASTERISK
    dash = look["linestyle"]
    colour = look["color"] if look["color"].startswith("#") else "#777777"
    return {
        "color": colour,
        "symbol": named or "circle-open",
        "dash": _DASHES.get(dash, "longdashdot") if isinstance(dash, str) else "longdashdot",
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)
