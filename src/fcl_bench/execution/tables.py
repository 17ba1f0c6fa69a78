"""The CSV files of a run as headers and rows. Tasks, rounds and clients count from 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain
from math import isnan

import numpy as np

from fcl_bench.data.partitions.holdings import Holdings
from fcl_bench.engine.exchanges import Upload
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import accuracy_matrix
from fcl_bench.engine.reports import Metrics
from fcl_bench.execution.adapt import Adapted
from fcl_bench.execution.breakdown import class_table, client_table
from fcl_bench.execution.folder import Table
from fcl_bench.execution.record import test_sizes

_TASKS = (
    "task",
    "classes_seen",
    "classes",
    "train_samples",
    "labelled",
    "accepted",
    "right",
    "test_samples",
    "accuracy",
    "stability",
    "plasticity",
    "retention",
)
#: Of the metrics, the series by task in the columns of the same names.
_SERIES = ("accuracy", "stability_by_task", "plasticity_by_task", "retention_by_task")


def run_tables(
    federation: Federation, metrics: Metrics, adapted: Adapted | None, shards: Sequence[Holdings]
) -> dict[str, Table]:
    """tasks.csv, accuracy_matrix.csv, task_aware_matrix.csv, class_accuracy.csv, uploads.csv; where there are any:
    client_accuracy.csv, routing_matrix.csv, bounds.csv, drift.csv, nodes.csv, rounds.csv.

    Args:
        federation: after its last task.
        metrics: of the run.
        adapted: the first stage, whose exchanges come before the method's.
        shards: per task, who holds which training samples, as far as the server knows.
    """
    state, tests = federation.state, test_sizes(federation)
    uploads = chain(adapted.ledger.cells() if adapted else (), state.ledger.cells())
    tables: dict[str, Table] = {
        "tasks.csv": _tasks(federation, metrics),
        "accuracy_matrix.csv": _matrix(state.answers["correct"], tests),
        "task_aware_matrix.csv": _matrix(state.answers["aware"], tests),
        "class_accuracy.csv": class_table(federation),
        "uploads.csv": ([field.name for field in fields(Upload)], uploads),
    }
    if (clients := client_table(federation, shards)) is not None:
        tables["client_accuracy.csv"] = clients
    if state.answers.routes:
        tables["routing_matrix.csv"] = _matrix(state.answers["routed"], tests)
    tables |= federation.exchange.tables()
    if federation.rounds.every:
        accuracies = (["" if isnan(value) else value for value in row] for row in federation.rounds.values())
        tables["rounds.csv"] = (["task", "round", "accuracy"], accuracies)
    return tables | {f"{name}.csv": _rows(audit.rows) for name, audit in federation.audits.items()}


def _tasks(federation: Federation, metrics: Metrics) -> Table:
    stream, ledger = federation.stream, federation.state.ledger
    series = list(zip(*(metrics[name] for name in _SERIES), strict=True))  # type: ignore[literal-required]
    rows, totals = [], {}
    for task in stream.tasks:
        labels, totals = ledger.labels(task.index), ledger.task_totals(task.index)
        known: list[object] = [task.index, task.columns_seen, len(task.columns)]
        known += [int(federation.transport.samples(task.index)[0].sum()), labels["labelled"], labels["accepted"]]
        known += ["" if labels["right"] is None else labels["right"], len(stream.test[task.index])]
        seconds = totals["client_seconds"] / ledger.clients + totals["server_seconds"]
        rows.append([*known, *series[task.index], *totals.values(), seconds])
    return [*_TASKS, *totals, "seconds"], rows


def _matrix(right: np.ndarray, tests: np.ndarray) -> Table:
    matrix = accuracy_matrix(right, tests)
    header = [f"task_{task}" for task in range(len(matrix))]
    return header, (["" if isnan(value) else value for value in row.tolist()] for row in matrix)


def _rows(rows: Sequence[Mapping[str, object]]) -> Table:
    """Rows that may have different keys; empty where a row has none, or its value is not finite."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    return header, [["" if row.get(key) is None else row[key] for key in header] for row in rows]
