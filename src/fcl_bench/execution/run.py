"""One run, from settings to a run folder; callable from tests and notebooks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.config import Settings
from fcl_bench.engine.evaluation import pooled_after
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.transport import OPEN_ROUNDS, Connection
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder, partition_arrays
from fcl_bench.execution.inputs import Inputs, prepare_inputs
from fcl_bench.execution.options import clients_of, exchange_steps, wrapped
from fcl_bench.execution.plan import Plan, make_plan
from fcl_bench.files import locked, read_json, special, user_path, writable
from fcl_bench.tracking import NoTracking, TrackedRun, Tracker, flat, numbers, require_packages

if TYPE_CHECKING:
    from fcl_bench.execution.run_json import Result, RunRecord

log = logging.getLogger(__name__)

#: What holds the number of a Slurm job, which it keeps when it is queued again; and where a checkpoint keeps it.
_JOB, _FORCED = "SLURM_JOB_ID", "forced"


@dataclass(frozen=True)
class Outcome:
    """The result of a run: its record (run.json), its folder, and whether it was complete before."""

    record: RunRecord
    folder: Path
    was_complete: bool


def run(settings: Settings, tracking: Tracker | None = None) -> Outcome:
    """Do the run that `settings` describe, or report it if it is already complete.

    An interrupted run goes on after its last complete task, with the result of an uninterrupted one.

    Args:
        tracking: who else is told how the run goes; it has no bearing on the result.

    Raises:
        UserError: the input can't work; the run's folder is then as it was, but for the log.
    """
    tracking = tracking or NoTracking()
    require_packages(tracking)
    environment.reuse_freed_memory()
    with settings.transport.connect() as link:
        return _run(settings, tracking, link)


def _run(settings: Settings, tracking: Tracker, link: Connection) -> Outcome:
    begin = time.perf_counter()
    plan = _planned(settings, link)
    environment.reset_peak_memory(plan.context.device)
    out = settings.scalars.out
    runs = writable(f"out={out}", user_path("out", out) / "runs")
    folder = RunFolder(runs / plan.label, plan.id)
    with locked(writable(f"out={out}", runs / ".locks") / f"{plan.label}.lock", f"doing the run {plan.label}"):
        if settings.scalars.force:
            folder.clear(keep_checkpoint=_queued_again(folder))
        if (record := folder.complete_record()) is not None:
            if not settings.transport.withdrawal:
                folder.checkpoint.remove()  # of a process that was killed between the two
            return Outcome(record, folder.path, was_complete=True)
        folder.clear(keep_checkpoint=True)
        try:
            with _logged_to(writable(f"out={out}", folder.path) / "run.log"):
                record = _carry_out(plan, folder, begin, tracking, link)
                return Outcome(record, folder.path, was_complete=False)
        except UserError:
            folder.remove_if_empty()
            raise


def _planned(settings: Settings, link: Connection) -> Plan:
    """The plan; of data that stay at the clients' sites, once these have told the hash of theirs."""
    plan = make_plan(settings)
    return make_plan(settings, link.data_of(clients_of(plan))) if plan.dealt.dataset.elsewhere else plan


def _queued_again(folder: RunFolder) -> bool:
    """Whether this Slurm job began the run anew itself, before it was interrupted and queued again with force=true."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return False
    try:
        return bool(read_json(folder.checkpoint.folder / "state.json").get(_FORCED) == os.environ.get(_JOB, ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent or damaged


def _carry_out(plan: Plan, folder: RunFolder, begin: float, tracking: Tracker, link: Connection) -> RunRecord:
    link.begin(plan.id, plan.context, plan.prepares)
    if plan.context.cudnn == "autotuned" and plan.context.device.type != "cuda":
        log.warning("cudnn=autotuned changes nothing here: this process computes on the CPU")
    with environment.choosing_kernels(plan.context.cudnn):
        inputs = prepare_inputs(plan, folder.path, link)
        with environment.computing(plan.context.threads):
            return _learn(plan, folder, begin, tracking, link, inputs)


def _learn(
    plan: Plan, folder: RunFolder, begin: float, tracking: Tracker, link: Connection, inputs: Inputs
) -> RunRecord:
    settings, dealt = plan.settings, plan.dealt
    method, context = settings.method, plan.context
    transport = link.federate(clients_of(plan), inputs.train, folder.checkpoint.folder / "clients")
    transport = wrapped(transport, method, context, settings)
    audits = {**method.audits(context)}
    if settings.scalars.drift:
        from fcl_bench.execution.drift import FeatureDrift

        audits["drift"] = FeatureDrift(settings.scalars.drift, context.seed, dealt.shards)
    make: Callable[..., Federation] = Federation
    if current := settings.transport.rounds == OPEN_ROUNDS:
        from fcl_bench.options.open_rounds import OpenFederation

        make = partial(OpenFederation, order=settings.transport.order)
    federation = make(
        method=method,
        context=context,
        stream=dealt.stream,
        transport=transport,
        test=inputs.test,
        audits=audits,
        evaluate_rounds=settings.scalars.evaluate_rounds,
        drops=settings.scalars.drops,
        minimum=settings.transport.minimum,
        steps=exchange_steps(method, context, settings),
        by_sample=settings.scalars.predictions,
        train=inputs.train if settings.held_out.validation and settings.held_out.test else None,
    )
    seconds_before, commits = _resume(federation, folder)
    if current and (federation.state.tasks_done or federation.state.rounds_done):
        _write_current(plan, folder, federation, inputs)

    tracked = TrackedRun(
        id=plan.id,
        label=plan.label,
        config=flat(settings.identity(), separator="."),
        out=user_path("out", settings.scalars.out),
        tasks_done=federation.state.tasks_done,
        fresh=settings.scalars.force and not federation.state.tasks_done,
    )
    with closing(tracking.start(tracked)) as tracker:

        def checkpoint(federation: Federation) -> None:
            done = federation.state.rounds_done == 0
            if done:
                _tell(tracker, federation)
            state, tensors = federation.save()
            state |= {"seconds": seconds_before + time.perf_counter() - begin, "commits": commits}
            if settings.scalars.force and _JOB in os.environ:
                state[_FORCED] = os.environ[_JOB]
            folder.checkpoint.save(state, tensors)
            if current:
                _write_current(plan, folder, federation, inputs)
            if done:
                log.debug("task %d of %d is kept", federation.state.tasks_done, len(federation.stream.tasks))

        federation.run(checkpoint, settings.transport.every if current else settings.scalars.checkpoint_rounds)
        from fcl_bench.execution.record import run_record

        seconds = seconds_before + time.perf_counter() - begin
        record = run_record(plan, federation, inputs, link.about(), seconds)
        if len(commits) > 1:
            record["environment"]["git_commit"] = ", ".join(commit or "unknown" for commit in commits)
        # This comes before the record is written: a run that is killed in between reports it again.
        summary = {"metrics": record["metrics"], "communication": record["communication"], "runtime": record["runtime"]}
        tracker.finish(numbers(summary))
    written = _write(plan, folder, federation, inputs, record)
    link.complete()
    return written


def _write_current(plan: Plan, folder: RunFolder, federation: Federation, inputs: Inputs) -> None:
    """Write the model as of the last checkpoint, of a run that is under way."""
    from fcl_bench.execution.model_file import about, model_tensors, write_model

    if federation.state.rounds_done:  # within a step
        federation.server.finish_task()
    labels = torch.from_numpy(plan.dealt.stream.class_order)
    tensors = model_tensors(federation.server, labels, inputs.adapted)
    write_model(folder.path / "model.safetensors", tensors, about(plan, inputs))


def _write(plan: Plan, folder: RunFolder, federation: Federation, inputs: Inputs, record: Result) -> RunRecord:
    """Write the run's files. What makes them is imported only here: a run that was complete makes none."""
    from fcl_bench.execution.model_file import about, model_tensors
    from fcl_bench.execution.record import confusion_arrays, run_tables, sample_files

    dealt, named = plan.dealt, plan.dealt.dataset.class_names
    return folder.write(
        record,
        plan.settings.resolved,
        run_tables(federation, record["metrics"], inputs.adapted, dealt.shards, named),
        {
            "partition.npz": partition_arrays(dealt.stream, dealt.shards, dealt.labelled),
            "confusion.npz": confusion_arrays(federation, named),
        },
        (
            model_tensors(federation.server, torch.from_numpy(dealt.stream.class_order), inputs.adapted),
            about(plan, inputs),
        ),
        {**sample_files(federation), **drawn(record, federation)},
    )


def drawn(record: Result, federation: Federation) -> dict[str, bytes]:
    """`pictures.drawn`, which imports Matplotlib (0.4 s)."""
    from fcl_bench.execution import pictures

    return pictures.drawn(record, federation)


def _tell(tracker: Tracker, federation: Federation) -> None:
    """What a tracker hears after a task: accuracy on all classes so far in percent, bytes, seconds."""
    state = federation.state
    task = federation.stream.tasks[state.tasks_done - 1]
    accuracy = pooled_after(task.index, state.answers["correct"], federation.stream.test_sizes)
    known = {"classes_seen": task.columns_seen, **state.ledger.task_totals(task.index)}
    tracker.task(numbers({"accuracy": None if np.isnan(accuracy) else accuracy, **known}), task.index)


def _resume(federation: Federation, folder: RunFolder) -> tuple[float, list[str | None]]:
    """Bring `federation` to the last checkpoint, if any; returns the seconds before it and the code's commits."""
    found, commit = folder.checkpoint.load(), environment.git_commit()
    if found is None:
        return 0.0, [commit]
    saved, tensors = found
    federation.restore(saved, tensors)
    within = f", round {saved['rounds_done']}" if saved["rounds_done"] else ""
    log.info("going on after task %d of %d%s", saved["tasks_done"], len(federation.stream.tasks), within)
    return float(saved["seconds"]), list(dict.fromkeys([*saved.get("commits", [None]), commit]))


class _RunLog(logging.FileHandler):
    """A run's log. A failure to write it is reported as for any other file, not by logging's own traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """What the package logs in this block goes to `path` too."""
    if found := special(path):
        raise UserError(f"{path} is {found}", "remove it: the run's log goes there")
    handler = _RunLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("fcl_bench")
    package.addHandler(handler)

    def note(level: int, text: str) -> None:
        # This goes to the file only: the terminal has the error line and the tables.
        handler.handle(package.makeRecord("fcl_bench", level, "", 0, text, (), None))

    try:
        note(logging.INFO, "run starts")
        yield
        note(logging.INFO, "run is complete")
    except UserError as error:
        with suppress(OSError):  # the error itself is what the user must read
            note(logging.ERROR, str(error))
        raise
    finally:
        package.removeHandler(handler)
        with suppress(OSError):  # what it could not write was an error already
            handler.close()
