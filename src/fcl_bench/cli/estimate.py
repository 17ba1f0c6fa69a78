"""What a run would take, from a try: its first tasks, with two rounds each, whose times are then multiplied."""

from __future__ import annotations

import dataclasses
import io
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.backbones.backbone import Extractor
from fcl_bench.data.sources.base import Split
from fcl_bench.engine.checkpoint import Checkpoint
from fcl_bench.engine.loop import Federation
from fcl_bench.execution.folder import partition_arrays
from fcl_bench.execution.inputs import cache_folder, prepare_inputs
from fcl_bench.execution.options import clients_of, exchange_steps, wrapped
from fcl_bench.execution.plan import Plan
from fcl_bench.files import json_hash

#: A try does two tasks at least, since the first one's times have the start-up in them, and goes on up to the first
#: number of seconds, since short times vary; above the second number it ends after any task.
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 10.0
#: Rounds of a task in a try.
_ROUNDS = 2
#: Bytes of a run's folder that depend on no setting (most of them are the picture's), and of a row of uploads.csv.
_FIXED_BYTES, _ROW_BYTES = 130_000, 65
#: Batches that a frozen network computes in a try.
_BATCHES = 3


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds, bytes of memory at the peak, and bytes of the run's folder."""

    seconds: float
    memory: int
    disk: int


class _EnoughError(Exception):
    """The try has seen what it needs."""


class _FewBatches(Extractor):
    """A frozen network that computes a few batches for all samples; `left`: seconds that the others would take."""

    def __init__(self, whole: Extractor) -> None:
        self.identity, self.left, self._whole = {"tried": json_hash(whole.identity)}, 0.0, whole

    def dimension(self, split: Split) -> int:
        return self._whole.dimension(split)

    def batches(self, split: Split, start: int = 0) -> Iterator[torch.Tensor]:
        begin = time.perf_counter()
        rows = torch.cat(list(islice(self._whole.batches(split, start), _BATCHES)))
        self.left += (time.perf_counter() - begin) * (len(split) / len(rows) - 1)
        yield rows[torch.arange(len(split)) % len(rows)]


def is_tried(plan: Plan) -> bool:
    """Whether the run can be tried: it has no first stage, and all its clients are in this process."""
    settings = plan.settings
    return settings.transport.sees_everything and not (settings.adapt.trains_network or plan.dealt.dataset.elsewhere)


def estimated(plan: Plan) -> Estimate:
    """What the run would take once it is planned. Nothing stays of the try. Raises a `UserError`: it cannot work."""
    settings, context = plan.settings, plan.context
    few = None
    if plan.extractor is not None and plan.extractor.cacheable and not _cached(plan, plan.extractor):
        few = _FewBatches(plan.extractor)
        plan = dataclasses.replace(plan, extractor=few)
    method = settings.method
    if (training := getattr(method, "training", None)) is not None and training.rounds > _ROUNDS:
        short = dataclasses.replace(training, rounds=_ROUNDS)
        method = dataclasses.replace(method, training=short)  # type: ignore[type-var]  # all methods are dataclasses
    marks, first_rounds, models = [time.perf_counter()], list[float](), list[int]()

    def look(federation: Federation) -> None:
        if federation.state.rounds_done:
            if federation.state.rounds_done == 1:
                first_rounds.append(time.perf_counter() - marks[-1])
            return
        checkpoint.save(*federation.save())
        marks.append(time.perf_counter())
        models.append(sum(tensor.nbytes for tensor in federation.server.model().values()))
        if marks[-1] - marks[0] > (_MOST_SECONDS if len(models) < 2 else _LEAST_SECONDS):
            raise _EnoughError

    environment.reset_peak_memory(context.device)
    with (
        settings.transport.connect() as link,
        tempfile.TemporaryDirectory() as scratch,
        environment.choosing_kernels(context.cudnn),
    ):
        checkpoint = Checkpoint(Path(scratch) / "checkpoint", 0)
        inputs = prepare_inputs(plan, Path(scratch), link)
        environment.describe(context.device)  # as each run's record does
        prepared = time.perf_counter() - marks[0] + (few.left if few else 0.0)
        clients = dataclasses.replace(clients_of(plan), method=method)
        transport = wrapped(link.federate(clients, inputs.train, Path(scratch)), method, context, settings)
        steps, audits = exchange_steps(method, context, settings), method.audits(context)
        stream = plan.dealt.stream
        federation = Federation(method, context, stream, transport, inputs.test, audits, steps=steps)
        marks[:] = [time.perf_counter()]
        with environment.computing(context.threads), suppress(_EnoughError):
            federation.run(look, 1)
    whole = settings.method.server(context)
    rounds = np.array([(whole.rounds(task), federation.server.rounds(task)) for task in stream.tasks])
    if len(first_rounds) == len(models):  # with all that is done beside the halves of the method
        learning = np.array(first_rounds) * rounds[: len(models), 1]
    else:
        totals = map(federation.state.ledger.task_totals, range(len(models)))
        learning = np.array([found["client_seconds"] + found["server_seconds"] for found in totals])
    rest = np.maximum(np.diff(marks) - learning, 0)  # tests, above all
    size, tests = np.array([len(own) for own in stream.train]), np.maximum(np.cumsum(stream.test_sizes), 1)
    looks = 1 + rounds[:, 0] // settings.scalars.evaluate_rounds if settings.scalars.evaluate_rounds else 1
    further = _pace(learning, size) * size * (rounds[:, 0] / rounds[:, 1] - 1)
    seconds = (_all_tasks(learning, size) + further + _all_tasks(rest, tests) * looks).sum()
    if len(models) > 1:
        growth = (models[-1] - models[0]) // (len(models) - 1)
    else:  # the first task alone: a later one adds as much as the tensors with a side for its classes have
        tensors, classes = federation.server.model().values(), len(stream.tasks[0].new_columns)
        growth = sum(tensor.nbytes for tensor in tensors if classes in tensor.shape)
    model = models[-1] + growth * (len(stream.tasks) - len(models))
    rows = len(federation.state.ledger.rows) / rounds[: len(models), 1].sum() * rounds[:, 0].sum()
    packed = io.BytesIO()
    np.savez_compressed(packed, **partition_arrays(stream, plan.dealt.shards, plan.dealt.labelled))  # type: ignore[arg-type]
    disk = _FIXED_BYTES + model + int(_ROW_BYTES * rows) + packed.tell()
    return Estimate(prepared + float(seconds), environment.peak_memory(context.device), disk)


def _pace(times: np.ndarray, amounts: np.ndarray) -> float:
    """Seconds per unit of the `amounts` (T,), from the tasks of the try but its first."""
    return float((times / amounts[: len(times)])[min(1, len(times) - 1) :].mean())


def _all_tasks(times: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """The times (T,) of all tasks, of which the first were tried, by how much there is to do in each (T,)."""
    return np.append(times, _pace(times, amounts) * amounts[len(times) :])


def _cached(plan: Plan, extractor: Extractor) -> bool:
    """Whether the cache has the features of both sides of the data set."""
    folder, dataset = cache_folder(plan), plan.dealt.dataset
    keys = [json_hash({**extractor.identity, "data": side.fingerprint}) for side in (dataset.train, dataset.test)]
    return folder is not None and all(any(folder.glob(f"*-{key}.safetensors")) for key in keys)
