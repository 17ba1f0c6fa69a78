"""Our own runs behind the numbers of README and docs: small tables in the repository, for comparison with a user's.

`NAME.csv` has one row per run with what varies among the runs and their measures; `NAME.yaml` has what they share, the
pages that show the numbers, the commands and the revisions of the code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fcl_bench.config import text
from fcl_bench.errors import UserError, choices
from fcl_bench.results.measures import MEASURES
from fcl_bench.results.summarise import setting, signature

log = logging.getLogger(__name__)

#: The knob by which tables tell a reference run from a user's own.
FROM = "method.from"


def folder() -> Path:
    """Return the folder of the tables: in the installed package, or results/ in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "reference"
    return installed if installed.is_dir() else package.parents[1] / "results"


def names() -> list[str]:
    """Return the names of all tables."""
    return sorted(file.stem for file in folder().glob("*.csv"))


def load(name: str) -> pd.DataFrame:
    """Return a table's runs like `collect`, without what only a folder has: `folder` is empty, seconds are NaN.

    Raises:
        UserError: there is no such table.
    """
    if name not in names():
        raise UserError(f"--reference {name} is not known", choices(names(), name))
    same = yaml.safe_load((folder() / f"{name}.yaml").read_text())["same"]
    rows = pd.read_csv(folder() / f"{name}.csv", dtype=object, keep_default_na=False, na_values=[""])
    shared = {key: _value(value) for key, value in same.items() if key not in rows}
    # As in the frame of `collect`, an integer stays one in a column where other runs have no value.
    rows = pd.DataFrame({**rows.map(_value), **shared}, dtype=object)
    measured = {measure: rows.get(measure, np.nan) for measure in MEASURES}
    run = {"seed": rows["seed"].astype(int), "folder": "", "path": "", "profile": "full", "written": 0.0}
    # An id of digits alone is no number.
    run |= {"run_id": rows["run_id"].astype(str), "experiment": None, "track": None, FROM: "reference"}
    return pd.DataFrame({**rows, **measured, **run}, dtype=object).astype(dict.fromkeys(MEASURES, float)).copy()


def _value(read: Any) -> Any:
    """Return a number if the text is one as tables write it; a fingerprint that looks like a number stays text."""
    for kind in (int, float) if isinstance(read, str) else ():
        with suppress(ValueError):
            if text(number := kind(read)) == read:
                return number
    return read


def is_own(rows: pd.DataFrame) -> pd.Series:
    """Return, per run or row of a summary, whether it is a user's own; reference runs have no folder, so no curves."""
    return rows[FROM] != "reference" if FROM in rows else pd.Series(True, index=rows.index)


def beside(own: pd.DataFrame, wanted: Sequence[str]) -> pd.DataFrame:
    """Return a user's runs, and below them the reference runs of the same settings on any device.

    Args:
        own: the result of `collect`, after selection.
        wanted: names of tables; all tables if empty.
    """
    there = pd.concat([load(name) for name in wanted or names()], ignore_index=True)
    if own.empty:
        return there.copy()  # in one piece, or pandas warns at the next new column
    both = pd.concat([own.assign(**{FROM: np.nan}), there], ignore_index=True)
    keys = [key for key in setting(both) if key != "device"]
    kinds = signature(both, keys)
    is_own = both[FROM].isna()
    chosen = is_own | kinds.isin(set(kinds[is_own]))
    if chosen.sum() == is_own.sum():
        log.warning("no reference run has the setting of one of these runs: %s", ", ".join(wanted or names()))
    return both[chosen].reset_index(drop=True).copy()
