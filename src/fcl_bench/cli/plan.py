"""`fcl-bench plan`: what runs would take, before anything starts, from earlier runs of this machine and formulas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.markup import escape

from fcl_bench.cli.command import DONE, USER_ERROR
from fcl_bench.cli.overrides import choosing, composed_as_typed, composition_error, ordered
from fcl_bench.composition import combinations
from fcl_bench.config import load_settings
from fcl_bench.data.shared import sharing
from fcl_bench.engine.codec import encoded
from fcl_bench.environment import peak_memory
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder, ignores_partition
from fcl_bench.execution.plan import Plan, make_plan
from fcl_bench.execution.screen import ScreenConsole, bytes_text, indifference, screen_table
from fcl_bench.files import slug, user_path
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import SAMPLES_BYTES, Message
from fcl_bench.sweeps.jobs import FAILED, JobReport
from fcl_bench.sweeps.summary import failures, name_of, varying
from fcl_bench.tracking.console import duration

USAGE = """usage: fcl-bench plan [-m] [key=value ...]

What a run, or with -m each run of a sweep, would take, before anything starts: seconds and disk by the nearest earlier
run of the method in out=FOLDER, scaled to the sizes of this one; the upload by the method's declared fields; memory."""
#: Seconds of a run that no size changes (files, pictures), at most; what a turn costs besides, in floating-point
#: operations; what a step of training costs besides, in samples.
_FIXED, _TURN, _STEP = 2.0, 2e7, 128
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


class Work(NamedTuple):
    """How much clients, server and tests have to do, and the model's size, in units of the method's own."""

    clients: float
    server: float
    tests: float
    model: float

    @classmethod
    def of(cls, config: dict[str, Any], class_samples: Sequence[int], inputs: int, square: int) -> Work:
        """Of a run's configuration, its training samples by class, and the numbers in each, if these are features.

        Args:
            square: how many M x M matrices the method has; with 0 they are M x r, r as many as a client's samples.
        """
        samples = sum(class_samples)
        method, tasks, turns = config["method"], config["tasks"], config["tasks"] * config["clients"]
        training, M = method.get("training"), method.get("M") or inputs
        if training:
            passes = training["rounds"] * training["epochs"] * training["fraction"]
            steps = (samples / training["batch_size"] + turns) * passes
            return cls(samples * passes + _STEP * steps, turns * training["rounds"], samples * (tasks + 1), 1)
        r = M if square else min(M, samples / turns)
        clients = 2 * samples * M * (inputs + r) + turns * (M * r + _TURN)
        server = (tasks if square else turns) * M * r**2 + turns * M * r + tasks * _TURN
        return cls(clients, server, samples * (tasks + 1) * M, M * len(class_samples))


def work(arguments: list[str]) -> int:
    """Print the plan; return the exit code: 2 if no run can start. Raises a `UserError` for wrong input."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    options = {argument for argument in arguments if argument.startswith("-")}
    if unknown := options - {"-m", "--multirun"}:
        raise UserError(f"plan has no option {min(unknown)}", "-m, and keys as for a run")
    typed = [argument for argument in ordered(arguments) if argument not in options]
    rows = []
    with sharing():
        for job in _jobs(typed) if options else [typed]:
            try:
                rows.append(_row(job))
            except UserError as error:
                if not options:
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
    out = user_path("out", settings.scalars.out)
    folder = RunFolder(out / "runs" / plan.label, plan.id)
    begun = (folder.path / "checkpoint").is_dir()
    row = _Row(
        job, "begun" if begun else "to do", plan.id, ignores_partition(settings.resolved), upload=upload_bytes(plan)
    )
    record = None if settings.scalars.force else folder.complete_record(read=())
    if record is not None:
        row.state, row.seconds, row.disk = "complete", record["runtime"]["total_seconds"], _disk(folder.path, 1)
        row.upload = record["communication"]["up_max_bytes"]
    else:
        wanted = Work.of(
            settings.resolved, plan.dealt.stream.class_samples.tolist(), plan.context.inputs, _square(plan)
        )
        row.memory = None if plan.context.network else _memory(plan)
        if (nearest := _nearest(plan, wanted, out / "runs")) is None:
            return row
        path, record, done = nearest
        row.seconds = _seconds(plan, wanted, done, record)
        row.disk = _disk(path, wanted.model / done.model)
        if row.upload is None and wanted == done:
            row.upload = record["communication"]["up_max_bytes"]
    row.memory = max(row.memory or 0, record["runtime"]["peak_memory_bytes"])
    return row


def _square(plan: Plan) -> int:
    """How many M x M matrices the method has; 1 if it does not say so."""
    return int(getattr(plan.settings.method, "matrices", lambda: 1)())


def _nearest(plan: Plan, wanted: Work, runs: Path) -> tuple[Path, Any, Work] | None:
    """The complete run of the method whose clients' work is most alike, on such a device; None: there is none."""
    settings, context = plan.settings, plan.context
    trained = settings.backbone.name if context.network else ""
    same, found = (settings.method.name, settings.adapt.name, context.device.type, trained), []
    for path in runs.glob(f"{slug(settings.method.name)}-*/run.json"):
        record = RunFolder(path.parent).complete_record(read=())
        if record is None or (raw := record["communication"]["raw"]) is None:
            continue
        features = raw["kind"] == "features"
        device = record["environment"]["device"].split()[0]
        if same == (record["method"], record["adapt"], device, "" if features else record["backbone"]):
            inputs = raw["sample_bytes"] // 4 - 1 if features else 1  # without the label, each of 4 bytes
            done = Work.of(RunFolder(path.parent).config(), record["class_samples"], inputs, _square(plan))
            found.append((abs(math.log(wanted.clients / done.clients)), path.parent, record, done))
    return min(found, key=lambda one: one[0])[1:] if found else None


def _seconds(plan: Plan, wanted: Work, done: Work, record: Any) -> float:
    """The seconds of an earlier run, each part scaled by its own work."""
    runtime, extractor = record["runtime"], plan.extractor
    clients, server, total = (runtime[f"{part}_seconds"] for part in ("client", "server", "total"))
    rest = max(total - clients - server - runtime["feature_seconds"], 0)
    fixed = min(rest, _FIXED)
    same = record["features"] == plan.identity and record["data_fingerprint"] == plan.fingerprint
    cached = extractor is None or (same and extractor.cacheable and plan.settings.scalars.cache.enabled)
    samples = sum(map(len, plan.dealt.stream.train)) / sum(record["class_samples"])
    features = 0 if cached else runtime["feature_cost_seconds"] * samples
    learnt = clients * wanted.clients / done.clients + server * wanted.server / done.server
    return learnt + features + fixed + (rest - fixed) * wanted.tests / done.tests


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


def _memory(plan: Plan) -> int:
    """Bytes of this process, which has data and libraries, and of a closed form's features and matrices."""
    stream, inputs, method = plan.dealt.stream, plan.context.inputs, plan.settings.method
    M, matrices = getattr(method, "M", None) or inputs, _square(plan)
    samples = sum(map(len, (*stream.train, *stream.test)))
    largest = max(int(clients.sizes().max()) for clients in plan.dealt.shards)
    return peak_memory(torch.device("cpu")) + 8 * (samples * inputs + inputs * M + largest * M + matrices * M * M)


def _disk(folder: Path, model: float) -> int:
    """Bytes of a run's folder, with a model so many times as large."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    return round(sum(sizes.values()) + (model - 1) * sizes.get("model.safetensors", 0))


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
        told += f"; seconds of {unknown} are not known: no complete run of the method is here"
    lines = [f"{len(left)} of {len(rows)} runs to do{told}"]
    reasons = [JobReport(0, list(row.overrides), FAILED, reason=row.why) for row in rows if row.why]
    lines += ["cannot run:", *failures(reasons)] if reasons else []
    for run, count in Counter(row.id for row in rows if row.id).items():
        names = [name_of(row.overrides, keys) for row in rows if row.id == run]
        lines += [f"one and the same run: {'; '.join(names)}"] if count > 1 else []
    moot = {key for key in keys if key in ("beta", "clients") or key.partition(".")[0] == "partition"}
    rest = keys - moot - {"seed"}
    unmoved = dict.fromkeys(name_of(row.overrides, rest) if rest else "all runs" for row in rows if row.moot)
    lines.append(indifference(list(unmoved), moot, "seed" in keys))
    console.print("\n".join(filter(None, lines)), soft_wrap=True, markup=False)
