"""`fcl-bench plan`: what runs would take, before anything starts: bytes as declared, the rest from a short try."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.markup import escape

from fcl_bench.cli.command import DONE, USER_ERROR, Parser
from fcl_bench.cli.estimate import Estimate, estimated, is_tried
from fcl_bench.cli.overrides import choosing, composed_as_typed, composition_error, ordered
from fcl_bench.composition import combinations
from fcl_bench.config import load_settings
from fcl_bench.data.shared import sharing
from fcl_bench.engine.codec import encoded
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder, ignores_partition
from fcl_bench.execution.plan import Plan, make_plan
from fcl_bench.execution.screen import ScreenConsole, bytes_text, screen_table
from fcl_bench.files import user_path
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import SAMPLES_BYTES, Message
from fcl_bench.sweeps.jobs import FAILED, JobReport
from fcl_bench.sweeps.summary import failures, name_of, unmoved, varying
from fcl_bench.tracking.console import duration

_WHAT = (
    "What a run, or with -m each run of a sweep, would take, before anything starts: the upload by the method's"
    " declared fields; seconds, memory and disk from a try of its first tasks, of which nothing stays."
)
#: Below this width each run has lines of its own, since columns have no room side by side.
_NARROW = 75
#: The types of a field's kinds as they travel; real numbers are still to be converted.
_TYPES = {"real": torch.float64, "whole": torch.int32, "bytes": torch.uint8}


@dataclass
class Planned:
    """What is known of one run; None where nothing is.

    Attributes:
        moot: whether the partition changes no more than the rounding of its result.
    """

    overrides: Sequence[str]
    state: str
    id: str = ""
    moot: bool = False
    upload: int | None = None
    rest: Estimate | None = None
    why: str = ""


def work(arguments: list[str]) -> int:
    """Print the plan; return the exit code: 2 if no run can start. Raises a `UserError` for wrong input."""
    parser = Parser(prog="fcl-bench plan", description=_WHAT)
    parser.add_argument("-m", "--multirun", action="store_true", help="plan each run of a sweep")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run")
    options = parser.parse_intermixed_args(arguments)
    rows = planned(ordered(options.overrides), options.multirun)
    _print(rows)
    return DONE if any(row.id for row in rows) else USER_ERROR


def planned(typed: list[str], multirun: bool) -> list[Planned]:
    """What is known of a run, or of each run of a sweep, in which wrong input is a row's `why`."""
    logging.getLogger("fcl_bench").addHandler(logging.NullHandler())  # a run itself gives its warnings
    rows, tries = list[Planned](), dict[tuple[str, ...], Estimate]()
    with sharing():
        for job in _jobs(typed) if multirun else [typed]:
            try:
                rows.append(_row(job, tries))
            except UserError as error:
                if not multirun:
                    raise
                rows.append(Planned(job, "cannot run", why=str(error)))
    return rows


def _jobs(typed: list[str]) -> list[tuple[str, ...]]:
    """The overrides of each run of a sweep, those of an experiment's grid included."""
    grid = composed_as_typed(choosing(typed), with_hydra=True).hydra.sweeper.params or {}
    try:
        return combinations([*(f"{key}={value}" for key, value in grid.items()), *typed])
    except Exception as error:
        raise composition_error(error, typed) from error


def _row(job: Sequence[str], tries: dict[tuple[str, ...], Estimate]) -> Planned:
    settings, begin = load_settings(composed_as_typed(list(job))), time.perf_counter()
    plan = make_plan(settings)
    planned = time.perf_counter() - begin
    own = RunFolder(user_path("out", settings.scalars.out) / "runs" / plan.label, plan.id)
    state = "begun" if (own.path / "checkpoint").is_dir() else "to do"
    row = Planned(job, state, plan.id, ignores_partition(settings.resolved), upload=upload_bytes(plan))
    record = None if settings.scalars.force else own.complete_record(read=())
    if record is not None:
        row.state, row.upload = "complete", record["communication"]["up_max_bytes"]
        disk = sum(file.stat().st_size for file in own.path.iterdir() if file.is_file())
        row.rest = Estimate(record["runtime"]["total_seconds"], record["runtime"]["peak_memory_bytes"], disk)
    elif is_tried(plan):
        # These hardly change how much a run has to do.
        key = tuple(text for text in job if text.partition("=")[0] not in ("seed", "beta", "partition"))
        found = tries.get(key) or tries.setdefault(key, estimated(plan))
        row.rest = replace(found, seconds=found.seconds + planned)
    return row


def upload_bytes(plan: Plan) -> int | None:
    """The most that one client sends in a task, by the declared fields; None where they do not say it."""
    method, context, total = plan.settings.method, plan.context, 0
    sizes, uploads = {**method.sizes(context), "c": max(plan.classes_per_task)}, Uploads.of(method, context)
    stages = getattr(method, "stages", lambda _: list(uploads.declared))(plan.dealt.stream.tasks[-1])
    for stage, times in Counter(stages).items():
        tensors: dict[str, torch.Tensor] = {}
        for name, own in uploads.declared[stage].items():
            shape = own.sized(sizes).shape
            if name == "*" and hasattr(method, "grow"):
                network = method.build_network(context)  # type: ignore[attr-defined]
                method.grow(network, [len(task.new_columns) for task in plan.dealt.stream.tasks], seed=0)
                tensors |= network.changing()
            elif plan.settings.secure.sums or name.endswith("*") or not all(isinstance(side, int) for side in shape):
                return None
            else:
                tensors[name] = torch.ones([int(side) for side in shape], dtype=_TYPES[own.kind])
        announced = SAMPLES_BYTES if "*" in uploads.declared[stage] else 0
        total += times * (encoded(Message(tensors, stage), context.wire, uploads).nbytes + announced)
    return total


def _print(rows: list[Planned]) -> None:
    keys, table = varying(row.overrides for row in rows), []
    for row in rows:
        took = row.rest
        seconds = took and (f"{took.seconds:.1f} s" if took.seconds < 90 else duration(took.seconds))
        sizes = (size and bytes_text(size) for size in (row.upload, took and took.memory, took and took.disk))
        cells = ("" if row.why else cell or "not known" for cell in (seconds, *sizes))
        table.append((escape(name_of(row.overrides, keys)), *cells, row.state))  # presets in brackets are no markup
    console, headers = ScreenConsole(), ("run", "seconds", "upload per client and task", "memory", "disk", "state")
    is_narrow = console.width < _NARROW
    shown = [" | ".join(line) for line in (headers, *table)] if is_narrow else [screen_table("", headers, table)]
    console.print(*shown, sep="\n")
    left = {row.id: row for row in rows if row.state in ("to do", "begun")}.values()
    known = [row.rest.seconds for row in left if row.rest]
    estimate = f", one by one in about {duration(sum(known))}" if known else ""
    if unknown := len(left) - len(known):
        estimate += (
            f"; seconds of {unknown} are not known: a first stage, and clients in other processes, are not tried"
        )
    lines = [f"{len(left)} of {len(rows)} runs to do{estimate}"]
    reasons = [JobReport(0, list(row.overrides), FAILED, reason=row.why) for row in rows if row.why]
    lines += ["cannot run:", *failures(reasons)] if reasons else []
    for run, count in Counter(row.id for row in rows if row.id).items():
        names = [name_of(row.overrides, keys) for row in rows if row.id == run]
        lines += [f"one and the same run: {'; '.join(names)}"] if count > 1 else []
    lines.append(unmoved([row.overrides for row in rows if row.moot], keys))
    console.print("\n".join(filter(None, lines)), soft_wrap=True, markup=False)
