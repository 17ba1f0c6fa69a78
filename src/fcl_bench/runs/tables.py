"""The CSV files of a run as headers and rows. Tasks, rounds and clients count from 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from math import isnan
from typing import Any

import numpy as np

from fcl_bench.data.splits.stream import Stream
from fcl_bench.engine.federation import Federation
from fcl_bench.engine.ledger import Upload
from fcl_bench.engine.metrics import accuracy_matrix
from fcl_bench.runs.adapt import Adapted

Table = tuple[list[str], Iterable[Iterable[Any]]]
_TASKS = (
    *("task", "classes_seen", "classes", "train_samples", "labelled", "accepted", "right"),
    *("test_samples", "accuracy"),
)


def run_tables(
    stream: Stream, federation: Federation, accuracy: list[float | None], adapted: Adapted | None
) -> dict[str, Table]:
    """tasks.csv, accuracy_matrix.csv, task_aware_matrix.csv, uploads.csv; where there are any: routing_matrix.csv,
    bounds.csv, drift.csv.

    Args:
        stream: the tasks.
        federation: after its last task.
        accuracy: [A_1..A_T], None where a task has no test sample.
        adapted: the first stage, whose exchanges come before the method's.
    """
    state = federation.state
    tests = np.array([len(indices) for indices in stream.test])
    uploads = chain(adapted.ledger.values() if adapted else (), state.ledger.values())
    tables = {
        "tasks.csv": _tasks(stream, federation, accuracy),
        "accuracy_matrix.csv": _matrix(accuracy_matrix(state.answers["correct"], tests)),
        "task_aware_matrix.csv": _matrix(accuracy_matrix(state.answers["aware"], tests)),
        "uploads.csv": ([field.name for field in fields(Upload)], uploads),
    }
    if state.answers.routes:
        tables["routing_matrix.csv"] = _matrix(accuracy_matrix(state.answers["routed"], tests))
    for name, audit in federation.audits.items():
        tables[f"{name}.csv"] = _rows(audit.rows)
    return tables


def _tasks(stream: Stream, federation: Federation, accuracy: list[float | None]) -> Table:
    ledger = federation.state.ledger
    totals = [ledger.task_totals(task.index) for task in stream.tasks]
    rows = [
        [
            task.index,
            task.columns_seen,
            len(task.columns),
            len(stream.train[task.index]),
            *list(ledger.labels(task.index).values())[1:],
            len(stream.test[task.index]),
            accuracy[task.index],
            *totals[task.index].values(),
            totals[task.index]["client_seconds"] / ledger.clients + totals[task.index]["server_seconds"],
        ]
        for task in stream.tasks
    ]
    return [*_TASKS, *totals[0], "seconds"], rows


def _matrix(matrix: np.ndarray) -> Table:
    header = [f"task_{task}" for task in range(len(matrix))]
    return header, (["" if isnan(value) else value for value in row.tolist()] for row in matrix)


def _rows(rows: list[dict[str, Any]]) -> Table:
    """Rows that may have different keys; empty where a row has none, or its value is not finite."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    return header, [["" if row.get(key) is None else row[key] for key in header] for row in rows]
