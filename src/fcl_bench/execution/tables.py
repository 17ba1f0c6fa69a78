"""The results of a run in detail, as files' rows and arrays. Tasks, rounds and clients count from 0."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

import numpy as np

from fcl_bench.data.partitions.base import Holdings
from fcl_bench.engine.ledger import Ledger, Upload
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import accuracy_matrix, class_accuracy, client_accuracy, finite, pooled_accuracy
from fcl_bench.engine.reports import Metrics
from fcl_bench.execution.adapt import Adapted
from fcl_bench.execution.folder import Table
from fcl_bench.protocol.context import Task

#: Of the metrics, the series by task.
_SERIES = ("accuracy", "stability_by_task", "plasticity_by_task", "retention_by_task")
_TASKS = (
    *("task", "classes_seen", "classes", "train_samples", "labelled", "accepted", "right", "test_samples"),
    *(name.removesuffix("_by_task") for name in _SERIES),
)


def run_tables(
    federation: Federation, metrics: Metrics, adapted: Adapted | None, shards: Sequence[Holdings], named: Sequence[str]
) -> dict[str, Table]:
    """tasks.csv, accuracy_matrix.csv, task_aware_matrix.csv, class_accuracy.csv, uploads.csv; where there are any:
    client_accuracy.csv, routing_matrix.csv, validation_matrix.csv, bounds.csv, drift.csv, nodes.csv, rounds.csv.

    Args:
        shards: per task, who holds which training samples, as far as the server knows.
        named: the data set's names of the labels 0, 1, ...; none if it has no names.
    """
    state, stream, tests = federation.state, federation.stream, federation.stream.test_sizes
    names = [f"task_{task.index}" for task in stream.tasks]
    classes = [named[label] if named else f"class_{label}" for label in stream.class_order]
    uploads = chain(adapted.ledger.values("") if adapted else (), state.ledger.values(""))
    validated = None if state.validation is None else (state.validation["correct"], stream.validation_sizes)
    tables: dict[str, Table] = {
        "tasks.csv": task_table(stream.tasks, state.ledger, held_samples(federation), tests, metrics, validated),
        "accuracy_matrix.csv": (names, accuracy_matrix(state.answers["correct"], tests).tolist()),
        "task_aware_matrix.csv": (names, accuracy_matrix(state.answers["aware"], tests).tolist()),
        "class_accuracy.csv": (classes, accuracy_by_class(federation).tolist()),
        "uploads.csv": ([field.name for field in fields(Upload)], uploads),
    }
    if (clients := accuracy_by_client(federation, shards)) is not None:
        rows = ([client, *accuracies] for client, accuracies in enumerate(clients.T.tolist()))
        tables["client_accuracy.csv"] = (["client", *names], rows)
    if state.answers.routes:
        tables["routing_matrix.csv"] = (names, accuracy_matrix(state.answers["routed"], tests).tolist())
    tables |= federation.exchange.tables()
    if federation.rounds.every:
        tables["rounds.csv"] = (list(federation.rounds.columns), federation.rounds.values())
    if validated is not None:
        tables["validation_matrix.csv"] = (names, accuracy_matrix(*validated).tolist())
    for name, audit in federation.audits.items():
        header = list(dict.fromkeys(key for row in audit.rows for key in row))
        tables[f"{name}.csv"] = (header, [[row.get(key) for key in header] for row in audit.rows])
    return tables


def held_samples(federation: Federation) -> list[int]:
    """(T,) how many training samples the clients have."""
    return [int(federation.transport.samples(task.index)[0].sum()) for task in federation.stream.tasks]


def task_table(
    tasks: Sequence[Task],
    ledger: Ledger,
    held: Sequence[int],
    tests: np.ndarray,
    metrics: Metrics,
    validation: tuple[np.ndarray, np.ndarray] | None,
) -> Table:
    """tasks.csv.

    Args:
        held, tests: (T,) numbers of training and test samples.
        validation: right answers (T, T) and samples (T,), where validation samples were asked about beside the test's.
    """
    series = list(zip(*(metrics[name] for name in _SERIES), strict=True))  # type: ignore[literal-required]
    rows, totals = [], {}
    for task in tasks:
        labels, totals = ledger.labels(task.index), ledger.task_totals(task.index)
        known: list[object] = [task.index, task.columns_seen, len(task.columns)]
        known += [held[task.index], labels["labelled"], labels["accepted"], labels["right"], int(tests[task.index])]
        seconds = totals["client_seconds"] / ledger.clients + totals["server_seconds"]
        rows.append([*known, *series[task.index], *totals.values(), seconds])
    header = [*_TASKS, *totals, "seconds"]
    if validation is not None:
        accuracies, sizes = finite(pooled_accuracy(*validation)), validation[1].tolist()
        rows = [[*row, size, accuracy] for row, size, accuracy in zip(rows, sizes, accuracies, strict=True)]
        header += ["validation_samples", "validation"]
    return header, rows


def accuracy_by_class(federation: Federation) -> np.ndarray:
    """(T, C) in percent, after each task; NaN before a class is seen, or without a test sample."""
    stream = federation.stream
    return class_accuracy(federation.state.answers.confusion.array, len(stream.tasks), len(stream.class_order))


def accuracy_by_client(federation: Federation, shards: Sequence[Holdings]) -> np.ndarray | None:
    """(T, K) in percent, after each task; None if the clients' holdings are unknown.

    `shards` are empty of samples that stay at their clients' sites.
    """
    if not any(len(own.indices) for own in shards):
        return None
    return client_accuracy(accuracy_by_class(federation), shards, federation.stream.train_columns)


def confusion_arrays(federation: Federation, named: Sequence[str]) -> dict[str, np.ndarray]:
    """confusion.npz: `after`, `label`, `answer`, `samples` (n,) of the counts that are not 0, and `class_order` (C,);
    `class_names` (C,), if the data set has names (see `run_tables`).

    After task `after`, `samples` test samples of class `label` were classified as `answer`, both as columns.
    """
    rows, order = federation.state.answers.confusion.array, federation.stream.class_order
    names = {"class_names": np.array([named[label] for label in order])} if named else {}
    return {**{name: rows[name] for name in rows.dtype.names or ()}, "class_order": order, **names}


def sample_files(federation: Federation) -> dict[str, bytes]:
    """predictions.parquet if `predictions` asks for it: one row per task and test sample so far.

    `after`, the `sample`'s index in the test set, its `label`, the `prediction` (both as the data set has them), and
    the `score` of that.
    """
    samples = federation.state.answers.samples
    if samples is None:
        return {}
    # Imported only now, since few runs keep them.
    import pyarrow
    import pyarrow.parquet

    rows, labels = samples.array, federation.stream.class_order
    columns = {
        "after": rows["after"],
        "sample": rows["sample"],
        "label": labels[rows["label"]],
        "prediction": labels[rows["answer"]],
        "score": rows["score"],
    }
    content = io.BytesIO()
    arrays = {name: np.ascontiguousarray(values) for name, values in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), content)
    return {"predictions.parquet": content.getvalue()}
