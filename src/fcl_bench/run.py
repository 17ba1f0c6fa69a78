"""One run, from settings to a run folder; callable from tests and notebooks."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.config import Settings
from fcl_bench.data.label_rate import keep_labels
from fcl_bench.data.sources import Dataset
from fcl_bench.data.stream import Stream
from fcl_bench.errors import UserError
from fcl_bench.evaluation.metrics import accuracy_matrix, metrics
from fcl_bench.features.backbone import Extractor
from fcl_bench.features.cache import FeatureCache
from fcl_bench.features.extract import Features, extract_features
from fcl_bench.federation.engine import Federation, FederationState
from fcl_bench.federation.ledger import Ledger
from fcl_bench.federation.message import WIRE_DTYPES, WireFormat
from fcl_bench.files import locked, slug
from fcl_bench.methods.base import Problem
from fcl_bench.randomness import generator
from fcl_bench.report.figures import accuracy_figure
from fcl_bench.report.run_folder import SCHEMA, RunFolder, partition_arrays, run_id, run_tables
from fcl_bench.report.screen import headline

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run left: its record (run.json), its folder, and whether it was complete before."""

    record: dict[str, Any]
    folder: Path
    was_complete: bool


@dataclass(frozen=True)
class _Plan:
    """Everything that is settled before any work is done or any file is written."""

    settings: Settings
    device: torch.device
    dataset: Dataset
    stream: Stream
    shards: list[list[np.ndarray]]
    labelled: np.ndarray
    extractor: Extractor
    problem: Problem
    id: str

    @property
    def classes_per_task(self) -> list[int]:
        return [len(task.new_columns) for task in self.stream.tasks]

    @property
    def label(self) -> str:
        settings = self.settings
        names = (settings.method.name, settings.data.name, settings.backbone.name, self.id)
        return "-".join(map(slug, names))


def run(settings: Settings) -> Outcome:
    """Do the run that `settings` describe, or report it if it is already complete.

    An interrupted run goes on after its last complete task, with the result of an uninterrupted one.

    Raises:
        UserError: the input can't work; nothing has been written but the log.
    """
    begin = time.perf_counter()
    plan = _plan(settings)
    environment.reset_peak_memory(plan.device)
    out = settings.scalars.out
    runs = _writable(f"out={out}", Path(out).expanduser() / "runs")
    folder = RunFolder(runs / plan.label)
    with locked(_writable(f"out={out}", runs / ".locks") / f"{plan.label}.lock", f"doing the run {plan.label}"):
        if settings.scalars.force:
            folder.clear()
        elif (record := folder.complete_record()) is not None:
            return Outcome(record, folder.path, was_complete=True)
        else:
            folder.clear(keep_checkpoint=True)
        with _logged_to(_writable(f"out={out}", folder.path) / "run.log"):
            return Outcome(_carry_out(plan, folder, begin), folder.path, was_complete=False)


def _plan(settings: Settings) -> _Plan:
    scalars = settings.scalars
    device = environment.choose_device(scalars.device)
    dataset = settings.data.load()
    stream = settings.split.cut(dataset, scalars.tasks, scalars.seed)
    shards = [
        [
            indices[part]
            for part in settings.partition.deal(
                stream.train_columns[indices],
                scalars.clients,
                scalars.beta,
                generator(scalars.seed, "partition", t),
            )
        ]
        for t, indices in enumerate(stream.train)
    ]
    labelled = np.ones(len(stream.train_columns), dtype=bool)
    if scalars.label_rate < 1:
        for t, clients in enumerate(shards):
            for k, indices in enumerate(clients):
                rng = generator(scalars.seed, "labels", t, k)
                labelled[indices] = keep_labels(stream.train_columns[indices], scalars.label_rate, rng)
        _require_labels(stream, labelled, scalars.label_rate)
    extractor = settings.backbone.open(dataset, device)
    problem = Problem(
        inputs=extractor.dimension(dataset.train),
        seed=scalars.seed,
        dtype=getattr(torch, scalars.dtype),
        device=device,
        wire=WireFormat(
            WIRE_DTYPES[scalars.wire.dtype], scalars.wire.gram, scalars.wire.columns, scalars.wire.projection
        ),
    )
    identity = {
        **settings.identity(),
        "data_fingerprint": dataset.fingerprint,
        "features": extractor.identity,
        "device": environment.device_kind(device),
    }
    plan = _Plan(settings, device, dataset, stream, shards, labelled, extractor, problem, run_id(identity))
    settings.method.check(problem, plan.classes_per_task)
    return plan


def _require_labels(stream: Stream, labelled: np.ndarray, rate: float) -> None:
    """Refuse a stream without a label; tell of classes without one."""
    if not labelled.any():
        raise UserError(
            f"label_rate={rate:g} leaves no label: every client keeps less than half a one of each task",
            "a larger label_rate, or fewer clients or tasks",
        )
    without = len(stream.class_order) - len(np.unique(stream.train_columns[labelled]))
    if without:
        log.warning("label_rate=%g leaves %d of %d classes without a label", rate, without, len(stream.class_order))


def _carry_out(plan: _Plan, folder: RunFolder, begin: float) -> dict[str, Any]:
    settings = plan.settings
    cache = None
    if settings.scalars.cache.enabled and plan.extractor.cacheable:
        where = settings.scalars.cache.dir
        cache = FeatureCache(_writable(f"cache.dir={where}", Path(where).expanduser()))
    features = extract_features(settings.backbone.name, plan.extractor, plan.dataset, cache)
    _require_range(features, plan.problem.dtype)
    federation = Federation(
        settings.method, plan.problem, plan.stream, plan.shards, plan.labelled, features.train, features.test
    )
    seconds_before = _resume(federation, folder)

    def checkpoint(federation: Federation) -> None:
        state = federation.state
        progress = {
            "tasks_done": state.tasks_done,
            "correct": state.correct.tolist(),
            "ledger": state.ledger.state(),
            "bounds": state.bounds,
            "seconds": seconds_before + time.perf_counter() - begin,
        }
        folder.save_checkpoint(progress, federation.tensors())

    state = federation.run(after_task=checkpoint)
    record = _record(plan, federation, features, seconds_before + time.perf_counter() - begin)
    matrix = accuracy_matrix(state.correct, _test_sizes(plan.stream))
    return folder.write(
        record,
        settings.resolved,
        run_tables(plan.stream, state.ledger, record["metrics"]["accuracy"], matrix, state.bounds),
        partition_arrays(plan.stream, plan.shards, plan.labelled),
        {**federation.server.model(), "class_order": torch.from_numpy(plan.stream.class_order)},
        accuracy_figure(
            headline(record), record["metrics"]["accuracy"], matrix, [task.columns_seen for task in plan.stream.tasks]
        ),
    )


def _resume(federation: Federation, folder: RunFolder) -> float:
    """Bring `federation` to the last checkpoint, if there is one; returns the seconds spent before it."""
    found = folder.load_checkpoint()
    if found is None:
        return 0.0
    saved, tensors = found
    ledger = Ledger(federation.state.ledger.clients)
    ledger.restore(saved["ledger"])
    correct = np.array(saved["correct"], dtype=np.int64)
    federation.restore(FederationState(saved["tasks_done"], correct, ledger, saved["bounds"]), tensors)
    log.info("going on after task %d of %d", saved["tasks_done"], len(federation.stream.tasks))
    return float(saved["seconds"])


def _require_range(features: Features, dtype: torch.dtype) -> None:
    """Refuse features whose Gram matrix would leave the range of the statistics' type."""
    n, d = features.train.shape
    largest = max(float(side.max().abs().maximum(side.min().abs())) for side in (features.train, features.test))
    # 1e6 leaves room for a random projection of any usual width.
    if largest > (torch.finfo(dtype).max / (n * d * 1e6)) ** 0.5:
        raise UserError(
            f"features of size {largest:.3g} overflow statistics in dtype={str(dtype).removeprefix('torch.')}",
            "features of a smaller scale" + (", or dtype=float64" if dtype != torch.float64 else ""),
        )


def _test_sizes(stream: Stream) -> np.ndarray:
    return np.array([len(indices) for indices in stream.test])


def _record(plan: _Plan, federation: Federation, features: Features, seconds: float) -> dict[str, Any]:
    settings, scalars, state = plan.settings, plan.settings.scalars, federation.state
    return {
        "schema": SCHEMA,
        "run_id": plan.id,
        "method": settings.method.name,
        "method_revision": settings.method.revision,
        "data": settings.data.name,
        "backbone": settings.backbone.name,
        "split": settings.split.name,
        "partition": settings.partition.name,
        "seed": scalars.seed,
        "beta": settings.beta,
        "clients": scalars.clients,
        "tasks": scalars.tasks,
        "data_fingerprint": plan.dataset.fingerprint,
        "features": plan.extractor.identity,
        "metrics": metrics(state.correct, _test_sizes(plan.stream)),
        "communication": {
            **state.ledger.communication(),
            "wire": asdict(scalars.wire),
            "accounting": settings.method.accounting(plan.problem, plan.classes_per_task),
        },
        "labels": {"rate": scalars.label_rate, **state.ledger.labels()},
        "bounds": state.bounds,
        "report": federation.server.report(),
        "runtime": {
            **state.ledger.runtime(),
            "feature_seconds": features.seconds,
            "feature_cost_seconds": features.cost,
            "feature_cache_hit": features.cache_hit,
            "total_seconds": seconds,
            "peak_memory_bytes": environment.peak_memory(plan.device),
        },
        "environment": environment.describe(plan.device),
    }


def _writable(key: str, folder: Path) -> Path:
    """`folder`, made if need be; a UserError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(
            f"{key}: {folder} cannot be written: {error.strerror}", "a folder that you may write to"
        ) from error
    return folder


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
