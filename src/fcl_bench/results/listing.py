"""Runs as a table with a row each: what tells them apart, ids, measures and dates."""

from __future__ import annotations

from datetime import datetime

import pandas as pd

from fcl_bench.config import text
from fcl_bench.errors import printable
from fcl_bench.results.measures import MEASURES
from fcl_bench.results.summarise import labelled, varying_setting
from fcl_bench.results.tables.cells import NOTHING, Cell, Sheet, decimals


def named(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs of `collect` with `run`: method, data set, and the settings in which these runs differ."""
    runs = labelled(runs)
    keys = [*varying_setting(runs), *(key for key in ("seed", "profile") if runs[key].nunique() > 1)]
    rows = runs[keys].map(text).drop(columns="data", errors="ignore").to_dict("records")
    settings = [" ".join(f"{key}={value}" for key, value in row.items() if value) for row in rows]
    names = runs["label"] + " " + runs["data"] + [f" {words}" if words else "" for words in settings]
    return runs.assign(run=names + runs["gates"].map(lambda gates: f" [gate: {gates}]" if gates else ""))


def listing(runs: pd.DataFrame, sort: str | None = None) -> Sheet:
    """Return the table of runs: the newest first, or the best.

    Args:
        runs: `run` (what names it), `run_id`, `written` and measures, which an unfinished run lacks.
        sort: name of a measure, which has a column then; None: the newest run is first.
    """
    runs = runs.sort_values("written", ascending=False, kind="stable")
    if sort is not None and sort in runs:
        runs = runs.sort_values(sort, ascending=not MEASURES[sort].higher, kind="stable")
    shown = [MEASURES[name] for name in dict.fromkeys(["A_avg", "A_T", *filter(None, [sort]), "up_max_mib"])]
    rows = []
    for run in runs.to_dict("records"):
        values = [run.get(one.name) for one in shown]
        cells = [NOTHING if pd.isna(v) else f"{v:.{decimals(v, one)}f}" for v, one in zip(values, shown, strict=True)]
        words = [printable(run["run"], kept=""), printable(run["run_id"], kept="")]
        rows.append([*map(Cell, [*words, *cells, f"{datetime.fromtimestamp(run['written']):%Y-%m-%d %H:%M}"])])
    return Sheet("Runs", ["run", "id", *(one.header for one in shown), "date"], rows, texts=2)
