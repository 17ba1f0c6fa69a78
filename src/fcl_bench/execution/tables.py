"""The CSV files of a run as headers and rows. Tasks, rounds and clients count from 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

from fcl_bench.data.partitions.holdings import Holdings
from fcl_bench.engine.exchanges import Upload
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import accuracy_matrix, finite, pooled_accuracy
from fcl_bench.engine.reports import Metrics
from fcl_bench.execution.adapt import Adapted
from fcl_bench.execution.breakdown import accuracy_by_class, accuracy_by_client
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
    client_accuracy.csv, routing_matrix.csv, validation_matrix.csv, bounds.csv, drift.csv, nodes.csv, rounds.csv.

    Args:
        federation: after its last task.
        metrics: of the run.
        adapted: the first stage, whose exchanges come before the method's.
        shards: per task, who holds which training samples, as far as the server knows.
    """
    state, stream, tests = federation.state, federation.stream, test_sizes(federation)
    names = [f"task_{task.index}" for task in stream.tasks]
    classes = [f"class_{label}" for label in stream.class_order]
    uploads = chain(adapted.ledger.cells() if adapted else (), state.ledger.cells())
    tables: dict[str, Table] = {
        "tasks.csv": _tasks(federation, metrics),
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
    if state.validation is not None:
        matrix = accuracy_matrix(state.validation["correct"], federation.validation_sizes)
        tables["validation_matrix.csv"] = (names, matrix.tolist())
    for name, audit in federation.audits.items():
        header = list(dict.fromkeys(key for row in audit.rows for key in row))
        tables[f"{name}.csv"] = (header, [[row.get(key) for key in header] for row in audit.rows])
    return tables


def _tasks(federation: Federation, metrics: Metrics) -> Table:
    stream, ledger = federation.stream, federation.state.ledger
    series = list(zip(*(metrics[name] for name in _SERIES), strict=True))  # type: ignore[literal-required]
    rows, totals = [], {}
    for task in stream.tasks:
        labels, totals = ledger.labels(task.index), ledger.task_totals(task.index)
        known: list[object] = [task.index, task.columns_seen, len(task.columns)]
        known += [int(federation.transport.samples(task.index)[0].sum()), labels["labelled"], labels["accepted"]]
        known += [labels["right"], len(stream.test[task.index])]
        seconds = totals["client_seconds"] / ledger.clients + totals["server_seconds"]
        rows.append([*known, *series[task.index], *totals.values(), seconds])
    header = [*_TASKS, *totals, "seconds"]
    if (answers := federation.state.validation) is not None:
        sizes = federation.validation_sizes
        accuracies = finite(pooled_accuracy(answers["correct"], sizes))
        rows = [[*row, size, accuracy] for row, size, accuracy in zip(rows, sizes.tolist(), accuracies, strict=True)]
        header += ["validation_samples", "validation"]
    return header, rows
