"""What a worker process of the leaderboard does: one run, or one search."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fcl_bench.cli import tune
from fcl_bench.cli.overrides import without_folders
from fcl_bench.config import text
from fcl_bench.data.shared import start_sharing
from fcl_bench.errors import UserError
from fcl_bench.execution.run import run
from fcl_bench.leaderboard.answers import right_of
from fcl_bench.leaderboard.store import row_of
from fcl_bench.leaderboard.track import settings_of
from fcl_bench.tracking import flat
from fcl_bench.tracking.console import printed_to


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        method, kind, request, setting, seed: which row it is, see `store.Store`.
        overrides: what one would type for it, without `out`.
    """

    method: str
    kind: str
    request: str
    setting: Mapping[str, str]
    seed: int
    overrides: list[str]


def begin(folders: list[str]) -> None:
    """Prepare a worker: it searches the user's folders of YAML files, and leaves Ctrl-C to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    without_folders(folders)
    start_sharing()


def do(job: Job, out: Path) -> dict[str, Any]:
    """Carry out a run, or read it if it is there; return its row, with its answers and the data's fingerprint.

    These are `right`, see `answers.right_of`, and `data`.
    """
    with printed_to(out / "logs" / f"{job.method}.log"):
        outcome = run(settings_of([*job.overrides, f"seed={job.seed}", f"out={out}"]))
    who = {"method": job.method, "kind": job.kind, "request": job.request, **job.setting, "seed": job.seed}
    found = row_of(outcome.record, outcome.folder / "uploads.csv")
    right = right_of(outcome.folder, found["A_T"])
    return {**who, **found, "right": right, "data": outcome.record["data_fingerprint"]}


def search(job: Job, out: Path, trials: int) -> dict[str, str]:
    """Search a method's declared knobs on validation samples, or go on with it; return the chosen ones as typed.

    Args:
        job: a run in the setting of the search.
        out: the folder of the trials' runs and of the study.
        trials: how many in all.
    """
    name = f"leaderboard-{job.method}-{job.request}"
    with printed_to(out / "logs" / f"{job.method}.log"):
        try:
            tune.work([*job.overrides, f"out={out}", "--trials", str(trials), "--study", name])
        except UserError as error:
            if "nothing to search" in str(error):
                return {}
            raise
    choice = yaml.safe_load((out / "studies" / f"{name}.yaml").read_text())
    return {key: text(value) or "null" for key, value in flat(choice, separator=".").items()}
