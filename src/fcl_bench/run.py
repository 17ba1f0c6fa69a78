"""One run, from settings to a run folder; callable from tests and notebooks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fcl_bench import environment
from fcl_bench.config import Settings
from fcl_bench.errors import UserError
from fcl_bench.federation.engine import Federation
from fcl_bench.files import locked, writable
from fcl_bench.inputs import prepare_inputs
from fcl_bench.plan import Plan, make_plan
from fcl_bench.report.record import run_record
from fcl_bench.report.run_folder import RunFolder, partition_arrays
from fcl_bench.report.run_pictures import run_figures
from fcl_bench.report.run_tables import run_tables

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run left: its record (run.json), its folder, and whether it was complete before."""

    record: dict[str, Any]
    folder: Path
    was_complete: bool


def run(settings: Settings) -> Outcome:
    """Do the run that `settings` describe, or report it if it is already complete.

    An interrupted run goes on after its last complete task, with the result of an uninterrupted one.

    Raises:
        UserError: the input can't work; nothing has been written but the log.
    """
    begin = time.perf_counter()
    plan = make_plan(settings)
    environment.reset_peak_memory(plan.device)
    out = settings.scalars.out
    runs = writable(f"out={out}", Path(out).expanduser() / "runs")
    folder = RunFolder(runs / plan.label)
    with locked(writable(f"out={out}", runs / ".locks") / f"{plan.label}.lock", f"doing the run {plan.label}"):
        if settings.scalars.force:
            folder.clear()
        elif (record := folder.complete_record()) is not None:
            return Outcome(record, folder.path, was_complete=True)
        else:
            folder.clear(keep_checkpoint=True)
        with _logged_to(writable(f"out={out}", folder.path) / "run.log"):
            return Outcome(_carry_out(plan, folder, begin), folder.path, was_complete=False)


def _carry_out(plan: Plan, folder: RunFolder, begin: float) -> dict[str, Any]:
    settings = plan.settings
    inputs = prepare_inputs(plan, folder.path)
    drift = settings.scalars.drift
    federation = Federation(
        settings.method, plan.problem, plan.stream, plan.shards, plan.labelled, inputs.train, inputs.test, drift
    )
    seconds_before = _resume(federation, folder)

    def checkpoint(federation: Federation) -> None:
        state, tensors = federation.save()
        folder.checkpoint.save({**state, "seconds": seconds_before + time.perf_counter() - begin}, tensors)

    federation.run(checkpoint, settings.scalars.checkpoint_rounds)
    record = run_record(plan, federation, inputs, seconds_before + time.perf_counter() - begin)
    return folder.write(
        record,
        settings.resolved,
        run_tables(plan.stream, federation, record["metrics"]["accuracy"], inputs.adapted),
        partition_arrays(plan.stream, plan.shards, plan.labelled),
        {**federation.server.model(), "class_order": torch.from_numpy(plan.stream.class_order)},
        run_figures(record, plan.stream, federation),
    )


def _resume(federation: Federation, folder: RunFolder) -> float:
    """Bring `federation` to the last checkpoint, if there is one; returns the seconds spent before it."""
    found = folder.checkpoint.load()
    if found is None:
        return 0.0
    saved, tensors = found
    federation.restore(saved, tensors)
    within = f", round {saved['rounds_done']}" if saved["rounds_done"] else ""
    log.info("going on after task %d of %d%s", saved["tasks_done"], len(federation.stream.tasks), within)
    return float(saved["seconds"])


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """What the package logs in this block goes to `path` too."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("fcl_bench")
    package.addHandler(handler)

    def note(level: int, text: str) -> None:
        # To the file only: the terminal has the error line and the tables.
        handler.handle(package.makeRecord("fcl_bench", level, "", 0, text, (), None))

    try:
        note(logging.INFO, "run starts")
        yield
        note(logging.INFO, "run is complete")
    except UserError as error:
        note(logging.ERROR, str(error))
        raise
    finally:
        package.removeHandler(handler)
        handler.close()
