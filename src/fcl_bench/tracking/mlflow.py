"""`logger=mlflow`: an MLflow run for each run, in one SQLite file or on a server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
class MLflow:
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
        if not self.uri.startswith(_SQLITE):
            return _Run(tracking.MlflowClient(self.uri), entities, run, None)
        file = user_path("logger.uri", self.uri.removeprefix(_SQLITE))
        writable(f"logger.uri={self.uri}", file.parent)
        with _lock(file):  # the first process makes the tables
            client = tracking.MlflowClient(f"{_SQLITE}{file}")
            return _Run(client, entities, run, file)


class _Run(Tracker):
    """One MLflow run. Processes that share a SQLite file take turns: the library itself gives up when it is busy."""

    def __init__(self, client: Any, entities: Any, run: TrackedRun, file: Path | None) -> None:
        self._client, self._entities, self._file = client, entities, file
        self._ended = False
        found = client.get_experiment_by_name(_EXPERIMENT)
        # MLflow's files of a run lie beside its own file, not in the working folder.
        folder = None if file is None else (file.absolute().parent / "mlflow_artifacts").as_uri()
        at = client.create_experiment(_EXPERIMENT, folder) if found is None else found.experiment_id
        before = [] if run.fresh else client.search_runs([at], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if before:
            self._id = before[0].info.run_id
            client.set_terminated(self._id, "RUNNING")
            return
        self._id = client.create_run(at, tags={_TAG: run.id}, run_name=run.label).info.run_id
        params = [entities.Param(name, str(value)) for name, value in run.config.items()]
        self._in_batches(params, lambda batch: client.log_batch(self._id, params=batch))

    def task(self, metrics: dict[str, float], step: int) -> None:
        with _lock(self._file):
            self._log({f"task/{name}": value for name, value in metrics.items()}, step)

    def finish(self, metrics: dict[str, float]) -> None:
        with _lock(self._file):
            self._log(metrics, 0)
            self._client.set_terminated(self._id, "FINISHED")
        self._ended = True

    def close(self) -> None:
        if not self._ended:
            with _lock(self._file):
                self._client.set_terminated(self._id, "KILLED")

    def _log(self, metrics: dict[str, float], step: int) -> None:
        now = int(1000 * time.time())
        points = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._in_batches(points, lambda batch: self._client.log_batch(self._id, metrics=batch))

    @staticmethod
    def _in_batches(items: list[Any], send: Callable[[list[Any]], Any]) -> None:
        for begin in range(0, len(items), _BATCH):
            send(items[begin : begin + _BATCH])


def _lock(file: Path | None) -> Any:
    return nullcontext() if file is None else locked(file.with_name(f".{file.name}.lock"), "writing to MLflow's file")
