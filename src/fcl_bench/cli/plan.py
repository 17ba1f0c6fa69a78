"""`fcl-bench plan`: what runs would take, before anything starts: bytes as declared, the rest from an earlier run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from rich.markup import escape

from fcl_bench.cli.command import DONE, USER_ERROR, Parser
from fcl_bench.cli.overrides import choosing, composed_as_typed, composition_error, ordered
from fcl_bench.composition import combinations
from fcl_bench.config import load_settings
from fcl_bench.data.shared import sharing
from fcl_bench.engine.codec import encoded
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder, ignores_partition
from fcl_bench.execution.plan import Plan, make_plan
from fcl_bench.execution.screen import ScreenConsole, bytes_text, screen_table
from fcl_bench.files import slug, user_path
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import SAMPLES_BYTES, Message
from fcl_bench.sweeps.jobs import FAILED, JobReport
from fcl_bench.sweeps.summary import failures, name_of, unmoved, varying
from fcl_bench.tracking.console import duration
from fcl_bench.typed import types_of

_WHAT = (
    "What a run, or with -m each run of a sweep, would take, before anything starts: the upload by the method's"
    " declared fields; seconds, memory and disk of an earlier run in out=FOLDER that had as much to do."
)
#: Keys that change no run's amount of work, or hardly.
_NO_WORK = (
    *("seed", "beta", "partition", "device", "out", "cache", "force", "preview", "checkpoint_rounds"),
    *("experiment", "track", "profile"),
)
#: The types of a field's kinds as they travel; real numbers are still to be converted.
_TYPES = {"real": torch.float64, "whole": torch.int32, "bytes": torch.uint8}


@dataclass
class _Row:
    """What is known of one run; None where nothing is.

    Attributes:
        moot: whether the partition changes no more than the rounding of its result.
    """

    overrides: Sequence[str]
    state: str
    id: str = ""
    moot: bool = False
    seconds: float | None = None
    upload: int | None = None
    memory: int | None = None
    disk: int | None = None
    why: str = ""


def work(arguments: list[str]) -> int:
    """Print the plan; return the exit code: 2 if no run can start. Raises a `UserError` for wrong input."""
    parser = Parser(prog="fcl-bench plan", description=_WHAT)
    parser.add_argument("-m", "--multirun", action="store_true", help="plan each run of a sweep")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run")
    options = parser.parse_intermixed_args(arguments)
    typed = ordered(options.overrides)
    rows = []
    with sharing():
        for job in _jobs(typed) if options.multirun else [typed]:
            try:
                rows.append(_row(job))
            except UserError as error:
                if not options.multirun:
                    raise
                rows.append(_Row(job, "cannot run", why=str(error)))
    _print(rows)
    return DONE if any(row.id for row in rows) else USER_ERROR


def _jobs(typed: list[str]) -> list[tuple[str, ...]]:
    """The overrides of each run of a sweep, those of an experiment's grid included."""
    grid = composed_as_typed(choosing(typed), with_hydra=True).hydra.sweeper.params or {}
    try:
        return combinations([*(f"{key}={value}" for key, value in grid.items()), *typed])
    except Exception as error:
        raise composition_error(error, typed) from error


def _row(job: Sequence[str]) -> _Row:
    settings = load_settings(composed_as_typed(list(job)))
    plan = make_plan(settings)
    runs = user_path("out", settings.scalars.out) / "runs"
    own = RunFolder(runs / plan.label, plan.id)
    state = "begun" if (own.path / "checkpoint").is_dir() else "to do"
    row = _Row(job, state, plan.id, ignores_partition(settings.resolved), upload=upload_bytes(plan))
    done = None if settings.scalars.force else own.complete_record(read=())
    row.state = state if done is None else "complete"
    found = _alike(plan, runs) if done is None else (own.path, done)
    if found is None:
        return row
    folder, record = found
    row.seconds, row.memory = record["runtime"]["total_seconds"], record["runtime"]["peak_memory_bytes"]
    if row.state != "complete" and settings.scalars.cache.enabled and plan.extractor and plan.extractor.cacheable:
        row.seconds -= record["runtime"]["feature_seconds"]  # the cache has them now
    if row.state == "complete" or row.upload is None:
        row.upload = record["communication"]["up_max_bytes"]
    row.disk = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return row


def _alike(plan: Plan, runs: Path) -> tuple[Path, Any] | None:
    """A complete run that had as much to do, on such a device, and its record; None: there is none."""
    method = plan.settings.method
    schemas: list[type] = [type(part) for part in (method, getattr(method, "training", None)) if part is not None]
    kinds = [(name, kind) for schema in schemas for name, kind in types_of(schema).items()]
    decimals = {name for name, kind in kinds if float in (kind, *get_args(kind))} - {"fraction"}  # of the clients
    wanted = _amounts(plan.settings.resolved, decimals)
    for path in runs.glob(f"{slug(method.name)}-*/run.json"):
        folder = RunFolder(path.parent)
        record = folder.complete_record(read=())
        if record is None or record["environment"]["device"].split()[0] != plan.context.device.type:
            continue
        if _amounts(folder.config(), decimals) == wanted:
            return folder.path, record
    return None


def _amounts(config: Mapping[str, Any], decimals: set[str]) -> dict[str, Any]:
    """What says how much a run has to do: its configuration without `_NO_WORK` and the `decimals` of the method."""
    method = {**config["method"], **(config["method"].get("training") or {}), "training": None}
    counted = {key: value for key, value in method.items() if key not in decimals}
    return {**{key: value for key, value in config.items() if key not in _NO_WORK}, "method": counted}


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


def _print(rows: list[_Row]) -> None:
    keys, table = varying(row.overrides for row in rows), []
    for row in rows:
        seconds = None if row.seconds is None else f"{row.seconds:.1f} s" if row.seconds < 90 else duration(row.seconds)
        sizes = (size and bytes_text(size) for size in (row.upload, row.memory, row.disk))
        cells = ("" if row.why else cell or "not known" for cell in (seconds, *sizes))
        table.append((escape(name_of(row.overrides, keys)), *cells, row.state))  # presets in brackets are no markup
    console, headers = ScreenConsole(), ("", "seconds", "upload per client and task", "memory", "disk", "state")
    console.print(screen_table("", headers, table))
    left = {row.id: row for row in rows if row.state in ("to do", "begun")}.values()
    known = [row.seconds for row in left if row.seconds is not None]
    told = f", one by one in about {duration(sum(known))}" if known else ""
    if unknown := len(left) - len(known):
        told += f"; seconds of {unknown} are not known: no complete run here had as much to do"
    lines = [f"{len(left)} of {len(rows)} runs to do{told}"]
    reasons = [JobReport(0, list(row.overrides), FAILED, reason=row.why) for row in rows if row.why]
    lines += ["cannot run:", *failures(reasons)] if reasons else []
    for run, count in Counter(row.id for row in rows if row.id).items():
        names = [name_of(row.overrides, keys) for row in rows if row.id == run]
        lines += [f"one and the same run: {'; '.join(names)}"] if count > 1 else []
    lines.append(unmoved([row.overrides for row in rows if row.moot], keys))
    console.print("\n".join(filter(None, lines)), soft_wrap=True, markup=False)
