"""`logger=mlflow`, `tensorboard` and `wandb`: what each tells its tracker of a run."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.files import locked, user_path, writable
from fcl_bench.tracking import TrackedRun, Tracker, require_packages

#: The MLflow experiment of all runs, which is made if it does not exist.
_EXPERIMENT = "fcl-bench"
#: The tag by which a continued run is found.
_TAG = "fcl_bench.run_id"
_SQLITE = "sqlite:///"
#: MLflow's limit on the number of items in one request.
_BATCH = 100


@dataclass
class MLflow(Tracker):
    """An MLflow run, which is found by its tag `fcl_bench.run_id` when the run continues.

    Args:
        uri: the tracking store: `sqlite:///FILE`, or a server's `http://...`. MLflow 3 refuses its own file store.
    """

    name = "mlflow"
    uri: str

    @property
    def packages(self) -> tuple[str, ...]:
        """What has to be installed."""
        return ("mlflow", "sqlalchemy", "alembic") if self.uri.startswith(_SQLITE) else ("mlflow",)

    def __post_init__(self) -> None:
        if "://" not in self.uri:
            raise UserError(f"logger.uri={self.uri} is not a store", "sqlite:///FILE or http://SERVER")

    def start(self, run: TrackedRun) -> Tracker:
        require_packages(self)
        from mlflow import entities, tracking

        # MLflow logs the creation of its tables to stderr, which is for what the user should know.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._entities, self._ended = entities, False
        self._file, store, artifacts = None, self.uri, None
        if self.uri.startswith(_SQLITE):
            self._file = user_path("logger.uri", self.uri.removeprefix(_SQLITE))
            writable(f"logger.uri={self.uri}", self._file.parent)
            # MLflow's files of a run lie beside its own file, not in the working folder.
            store, artifacts = f"{_SQLITE}{self._file}", (self._file.absolute().parent / "mlflow_artifacts").as_uri()
        with self._turn():  # the first process makes the tables
            self._client = tracking.MlflowClient(store)
            self._id = self._begun(run, artifacts)
        return self

    def _begun(self, run: TrackedRun, artifacts: str | None) -> str:
        """The id of the MLflow run: of the one that continues, or of a new one."""
        client = self._client
        found = client.get_experiment_by_name(_EXPERIMENT)
        at = client.create_experiment(_EXPERIMENT, artifacts) if found is None else found.experiment_id
        before = [] if run.fresh else client.search_runs([at], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if before:
            client.set_terminated(before[0].info.run_id, "RUNNING")
            return str(before[0].info.run_id)
        made = client.create_run(at, tags={_TAG: run.id}, run_name=run.label).info.run_id
        params = [self._entities.Param(name, str(value)) for name, value in run.config.items()]
        self._in_batches(params, lambda batch: client.log_batch(made, params=batch))
        return str(made)

    def _turn(self) -> Any:
        """Processes that share a SQLite file take turns: the library itself gives up when it is busy."""
        file = self._file
        if file is None:
            return nullcontext()
        return locked(file.with_name(f".{file.name}.lock"), "writing to MLflow's file")

    def task(self, metrics: dict[str, float], step: int) -> None:
        with self._turn():
            self._log({f"task/{name}": value for name, value in metrics.items()}, step)

    def finish(self, metrics: dict[str, float]) -> None:
        with self._turn():
            self._log(metrics, 0)
            self._client.set_terminated(self._id, "FINISHED")
        self._ended = True

    def close(self) -> None:
        if not self._ended:
            with self._turn():
                self._client.set_terminated(self._id, "KILLED")

    def _log(self, metrics: dict[str, float], step: int) -> None:
        now = int(1000 * time.time())
        points = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._in_batches(points, lambda batch: self._client.log_batch(self._id, metrics=batch))

    @staticmethod
    def _in_batches(items: list[Any], send: Callable[[list[Any]], Any]) -> None:
        for begin in range(0, len(items), _BATCH):
            send(items[begin : begin + _BATCH])


@dataclass
class TensorBoard(Tracker):
    """Event files in `<out>/tensorboard/<run>/`: one point per task, and the record's numbers at the end."""

    name = "tensorboard"
    packages = ("tensorboard",)

    def start(self, run: TrackedRun) -> Tracker:
        require_packages(self)
        from torch.utils.tensorboard import SummaryWriter

        folder = writable(f"out={run.out}", run.out / "tensorboard") / run.label
        if run.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        # Points that a killed process wrote before it saved its checkpoint are written again, so purge them: at 0, all.
        self._writer = SummaryWriter(str(folder), purge_step=run.tasks_done)
        rows = [f"| {name} | {value} |" for name, value in run.config.items()]
        self._writer.add_text("config", "\n".join(["| key | value |", "| --- | --- |", *rows]))
        return self

    def task(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"task/{name}", value, step)
        self._writer.flush()

    def finish(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"record/{name}", value, 0)

    def close(self) -> None:
        self._writer.close()


@dataclass
class WandB(Tracker):
    """A W&B run with the run's own id, so that a continued run is one run there too."""

    name = "wandb"
    packages = ("wandb",)
    project: str = knob(filled=True, words="logger.project=NAME")
    mode: str = knob(choices=("offline", "online"))

    def start(self, run: TrackedRun) -> Tracker:
        require_packages(self)
        import wandb

        # Each process of an interrupted run leaves its own files; W&B joins them by the id.
        self._complete = False
        self._run = wandb.init(
            project=self.project,
            id=run.id,
            name=run.label,
            resume="allow",
            mode=self.mode,
            dir=str(writable(f"out={run.out}", run.out / "wandb")),
            config=run.config,
            # No second set of signal handlers, no copy of the terminal, nothing printed between our lines.
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own step may only grow, so a task that is reported twice appears twice.
        self._run.define_metric("task/*", step_metric="task/step")
        return self

    def task(self, metrics: dict[str, float], step: int) -> None:
        self._run.log({"task/step": step, **{f"task/{name}": value for name, value in metrics.items()}})

    def finish(self, metrics: dict[str, float]) -> None:
        self._run.summary.update(metrics)
        self._complete = True

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._complete else 1)
