"""Runs to make tables of: real ones, and made-up frames as `collect` would return them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fcl_bench.cli.app import main
from fcl_bench.results.measures import MEASURES


def real_runs(out: Path, *arguments: str) -> Path:
    """`out`, after small runs of FedRAN on the digits with seeds 0 and 1."""
    small = ("method.M=32", "method.rank=8", "tasks=2", "clients=2", "seed=0,1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fcl-bench", "-m", f"out={out}", *small, *arguments])
        assert main() == 0
    return out


def made_up(*runs: dict[str, Any]) -> pd.DataFrame:
    """A frame of runs that differ from a plain one in what is given; `method_rank` means the knob `method.rank`."""
    rows = []
    for number, given in enumerate(runs):
        row = {
            "method": "fedran",
            "data": "digits",
            "beta": 0.1,
            "clients": 5,
            "tasks": 5,
            "wire.dtype": "float32",
            "device": "cpu",
            "seed": 0,
            "run_id": f"run{number}",
            "written": float(number),
            "path": "",
            **dict.fromkeys(MEASURES, np.nan),
            "A_avg": 80.0,
            "A_T": 70.0,
            "forgetting": 10.0,
            "up_max_mib": 4.0,
            "seconds_per_task": 1.0,
        }
        rows.append(row | {key.replace("method_", "method."): value for key, value in given.items()})
    return pd.DataFrame(rows, dtype=object).astype(dict.fromkeys(MEASURES, float))
