"""Finds existing runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from fcl_bench.api.recorded import Run
from fcl_bench.config import text
from fcl_bench.execution.finding import run_folder
from fcl_bench.files import user_path
from fcl_bench.results.collect import collect, selected

#: The columns that come first, in this order.
FIRST = (
    *("method", "data", "beta", "clients", "tasks", "seed"),
    *("A_avg", "A_T", "forgetting", "up_max_mib", "seconds_per_task", "error"),
)


def runs(out: str | Path = "outputs", **where: Any) -> pd.DataFrame:
    """Every complete run below a folder, one row each: its configuration, its measures, its id and its path.

    Measures are in percent, MiB and seconds, as in `fcl-tables`. Damaged runs are left out with a warning.

    Args:
        out: the folder that holds runs/ (`outputs`; `outputs/quick`).
        where: conditions on runs, as of `fcl-tables --where`: `method="stsa"`, `beta=[0.1, 0.5]`; keys with dots as
            `**{"method.rank": 512}`.

    Raises:
        UserError: no run has the key, or none has the value.
    """
    folder = user_path("out", str(out)) / "runs"
    frame = collect(folder)
    if frame.empty:
        return pd.DataFrame(columns=[*FIRST[:-1], "run_id", "path"])
    return arranged(selected(frame, [f"{key}={_values(value)}" for key, value in where.items()]))


def load(run: str | Path, out: str | Path = "outputs") -> Run:
    """Load a complete run.

    Args:
        run: the run's folder, a file in it, the run's id (or its first letters), or the name of its folder.
        out: the folder in which the run is looked for if `run` is not a path.

    Raises:
        UserError: there is no such run, or it is damaged.
    """
    return Run(run_folder(run, out))


def arranged(frame: pd.DataFrame, first: Iterable[str] = ()) -> pd.DataFrame:
    """Return `frame` with the most important columns first, and with rows numbered from 0."""
    front = [column for column in dict.fromkeys((*first, *FIRST)) if column in frame]
    return frame[[*front, *(column for column in frame if column not in front)]].reset_index(drop=True)


def _values(value: Any) -> str:
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return ",".join("null" if one is None else text(one) for one in (value if several else [value]))
