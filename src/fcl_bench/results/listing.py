"""Runs as rows of a list: what tells each from the others, some measures, its date and id."""

from __future__ import annotations

from datetime import datetime

import pandas as pd

from fcl_bench.config import text
from fcl_bench.errors import printable
from fcl_bench.results.measures import MEASURES
from fcl_bench.results.summarise import labelled, varying_setting
from fcl_bench.results.tables.cells import NOTHING, decimals


def named(runs: pd.DataFrame) -> pd.Series:
    """Return of each run of `collect` its method, data set, and the settings in which these runs differ."""
    runs = labelled(runs)
    differing = [key for key in ("seed", "profile") if runs[key].nunique() > 1]
    keys = [key for key in (*varying_setting(runs), *differing) if key != "data"]
    values = runs[keys].map(text).to_dict("records")
    names = [
        " ".join(
            [label, data, *(f"{key}={value}" for key, value in row.items() if value), gates and f"[gate: {gates}]"]
        )
        for label, data, gates, row in zip(runs["label"], runs["data"], runs["gates"], values, strict=True)
    ]
    return pd.Series(map(str.rstrip, names), runs.index)


def listing(runs: pd.DataFrame, sort: str | None = None) -> list[dict[str, str]]:
    """Return a row per run, header -> cell: the newest first, or the best.

    Args:
        runs: `run` (what names it), `written`, `run_id` and measures, which an unfinished run lacks.
        sort: name of a measure, which has a column then; None: the newest run is first.
    """
    shown = list(dict.fromkeys(["A_avg", "A_T", *filter(None, [sort]), "up_max_mib"]))
    runs = runs.sort_values("written", ascending=False, kind="stable")
    if sort in runs:
        runs = runs.sort_values(sort, ascending=not MEASURES[sort].higher, kind="stable")
    rows = []
    for run in runs.to_dict("records"):
        values = {MEASURES[name]: run.get(name) for name in shown}
        rows.append(
            {
                "run": printable(run["run"], kept=""),
                **{one.header: NOTHING if pd.isna(v) else f"{v:.{decimals(v, one)}f}" for one, v in values.items()},
                "date": f"{datetime.fromtimestamp(run['written']):%Y-%m-%d %H:%M}",
                "id": printable(run["run_id"], kept=""),
            }
        )
    return rows
