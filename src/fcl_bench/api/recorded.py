"""Complete runs: all below a folder, and one of them, read from its folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from fcl_bench.config import text
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder, run_folder
from fcl_bench.files import file_checksum, user_path
from fcl_bench.results.collect import collect, selected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fcl_bench.execution.predicting import Model

#: Files that are verified only when they are read: a model may be large.
_LATER = ("model.safetensors",)


class Tested(NamedTuple):
    """The test samples that count in a run's accuracies.

    Attributes:
        inputs: features (n, d), or n images, in the form that `Run.predict` takes.
        labels: (n,) int64, the data set's labels.
        tasks: (n,) int64, the task of each, from 0.
        indices: (n,) int64, the places of the samples in the data set's test side.
    """

    inputs: Any
    labels: np.ndarray
    tasks: np.ndarray
    indices: np.ndarray


class Run:
    """A complete run. Tables have one row per task, client or upload, all counted from 0; accuracies are in percent.

    Args:
        path: the run's folder.

    Attributes:
        path: the folder.
        record: run.json.
        config: the resolved configuration, as nested mappings.
        id: the run's id.

    Raises:
        UserError: the folder holds no complete run, or a damaged one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = RunFolder(self.path)
        self.record: Any = dict(folder.verified(read=_NotLater()))
        self.config = folder.config()
        self.id: str = self.record["run_id"]

    def __repr__(self) -> str:
        settings = [f"{key}={self.record[key]}" for key in ("method", "data", "beta", "seed")]
        scores = [f"{key} {self.metrics[key]:.2f}" for key in ("A_avg", "A_T") if self.metrics[key] is not None]
        return f"<Run {self.id} {' '.join(settings)}: {', '.join(scores)}>"

    @property
    def metrics(self) -> dict[str, Any]:
        """`metrics` of run.json: A_avg, A_T, forgetting, accuracy (A_1 to A_T), others: docs/reference/metrics.md."""
        return self.record["metrics"]

    @property
    def tasks(self) -> pd.DataFrame:
        """tasks.csv: classes seen, samples, accuracy, bytes and seconds of each task."""
        return self._table("tasks.csv").set_index("task")

    @property
    def accuracy_matrix(self) -> pd.DataFrame:
        """(T, T): accuracy on each task's test samples (column) after each task (row)."""
        return self._after("accuracy_matrix.csv", "task", range(self.record["tasks"]))

    @property
    def uploads(self) -> pd.DataFrame:
        """uploads.csv: bytes, samples and seconds of each task, round, client and stage."""
        return self._table("uploads.csv")

    @property
    def class_accuracy(self) -> pd.DataFrame:
        """(T, C): accuracy of each class (column, its label) after each task (row); NaN before it is seen."""
        with np.load(self._file("confusion.npz")) as file:
            return self._after("class_accuracy.csv", "class", file["class_order"])

    @property
    def client_accuracy(self) -> pd.DataFrame:
        """(T, K): accuracy on each client's own mix of classes (column) after each task (row)."""
        table = self._table("client_accuracy.csv").set_index("client").T
        return table.set_axis(pd.RangeIndex(len(table), name="after"), axis="index")

    @property
    def predictions(self) -> pd.DataFrame:
        """predictions.parquet of a run with `predictions=true`: each test sample's predicted class after each task."""
        return pd.read_parquet(self._file("predictions.parquet", "predictions=true saves them"))

    def confusion(self, after: int = -1) -> pd.DataFrame:
        """(C, C): the number of test samples of a class (row, its label) that were predicted as a class (column).

        Args:
            after: a task, from 0; -1 for the last one.
        """
        with np.load(self._file("confusion.npz")) as file:
            arrays = {name: file[name] for name in file.files}
        tasks = self.record["tasks"]
        if not -tasks <= after < tasks:
            raise UserError(f"after={after} is no task of this run", f"0 to {tasks - 1}, or -1 for the last")
        own, labels = arrays["after"] == after % tasks, arrays["class_order"]
        counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
        counts[arrays["label"][own], arrays["answer"][own]] = arrays["samples"][own]
        return pd.DataFrame(counts, pd.Index(labels, name="label"), pd.Index(labels, name="answer"))

    @cached_property
    def model(self) -> Model:
        """The model after the last task, on the GPU if there is one. Raises a `UserError` if it is damaged."""
        from fcl_bench.execution.predicting import Model

        file = self._file("model.safetensors")
        if file_checksum(file) != self.record["files"]["model.safetensors"]:
            raise UserError(f"{file} does not match its checksum", "the same command again makes the run anew")
        return Model(file)

    def predict(self, inputs: Any, tasks: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Return (n,) the predicted label of each sample, as the data set numbers its classes; see `model.predict`.

        Args:
            inputs: images (uint8 arrays, PIL images or paths), or the backbone's features (n, d).
            tasks: (n,) each sample's task; only for a model that is tested in batches of one task.
        """
        return self.model.predict(inputs, tasks)

    def scores(self, inputs: Any, tasks: Sequence[int] | np.ndarray | None = None) -> pd.DataFrame:
        """Return (n, C) the score of each class, whose label is the column; see `predict`."""
        return pd.DataFrame(self.model.scores(inputs, tasks), columns=pd.Index(self.model.labels, name="class"))

    def test_set(self) -> Tested:
        """The run's test samples, from the data that it was run on.

        Raises:
            UserError: the data do not exist any more, or have changed.
        """
        from fcl_bench.execution.predicting import tested_samples

        return Tested(*tested_samples(self.path, self.record, self.config))

    def plot(self) -> Figure:
        """Draw what accuracy.png shows as a Matplotlib figure, not shown and not saved."""
        from fcl_bench.execution.pictures import accuracy_figure
        from fcl_bench.execution.screen import headline

        matrix, seen = self.accuracy_matrix.to_numpy(float), self.tasks["classes_seen"].tolist()
        return accuracy_figure(headline(self.record), self.metrics["accuracy"], matrix, seen)

    def _after(self, name: str, of: str, columns: Sequence[int] | np.ndarray) -> pd.DataFrame:
        return self._table(name).set_axis(pd.Index(columns, name=of), axis="columns").rename_axis(index="after")

    def _table(self, name: str) -> pd.DataFrame:
        return pd.read_csv(self._file(name))

    def _file(self, name: str, remedy: str = "force=true makes the run anew, with it") -> Path:
        if name not in self.record["files"]:
            raise UserError(f"run {self.id} has no {name}", remedy)
        return self.path / name


class _NotLater:
    """All names but those in `_LATER`, for `RunFolder.verified`."""

    def __contains__(self, name: object) -> bool:
        return name not in _LATER


#: The columns that come first, in this order.
FIRST = (
    *("method", "data", "beta", "clients", "tasks", "seed"),
    *("A_avg", "A_T", "forgetting", "up_max_mib", "seconds_per_task", "error"),
)


def runs(out: str | Path = "outputs", **where: Any) -> pd.DataFrame:
    """Every complete run below a folder, one row each: its configuration, its measures, its id and its path.

    Measures are in percent, MiB and seconds, as in `fcl-tables`. Damaged runs are left out with a warning.

    Args:
        out: the folder that holds runs/ (`outputs`; `outputs/quick`).
        where: conditions on runs, as of `fcl-tables --where`: `method="stsa"`, `beta=[0.1, 0.5]`; keys with dots as
            `**{"method.rank": 512}`.

    Raises:
        UserError: no run has the key, or none has the value.
    """
    folder = user_path("out", str(out)) / "runs"
    frame = collect(folder)
    if frame.empty:
        return pd.DataFrame(columns=[*FIRST[:-1], "run_id", "path"])
    return arranged(selected(frame, [f"{key}={_values(value)}" for key, value in where.items()]))


def load(run: str | Path, out: str | Path = "outputs") -> Run:
    """Load a complete run.

    Args:
        run: the run's folder, a file in it, the run's id (or its first letters), or the name of its folder.
        out: the folder in which the run is looked for if `run` is not a path.

    Raises:
        UserError: there is no such run, or it is damaged.
    """
    return Run(run_folder(run, out))


def arranged(frame: pd.DataFrame, first: Iterable[str] = ()) -> pd.DataFrame:
    """Return `frame` with the most important columns first, and with rows numbered from 0."""
    front = [column for column in dict.fromkeys((*first, *FIRST)) if column in frame]
    return frame[[*front, *(column for column in frame if column not in front)]].reset_index(drop=True)


def _values(value: Any) -> str:
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return ",".join("null" if one is None else text(one) for one in (value if several else [value]))
