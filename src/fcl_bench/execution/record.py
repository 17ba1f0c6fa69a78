"""What a federation that has done its tasks says: run.json, and the tables of its folder."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from typing import Any, cast

import numpy as np

from fcl_bench import environment
from fcl_bench.config import Settings
from fcl_bench.data.partitions.base import Holdings
from fcl_bench.data.partitions.skew import skew
from fcl_bench.engine.evaluation import Predictions
from fcl_bench.engine.ledger import Ledger, Upload
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import accuracy_matrix, class_accuracy, client_accuracy, finite, metrics, pooled_accuracy
from fcl_bench.engine.reports import Compute, Dropped, Metrics
from fcl_bench.errors import UserError
from fcl_bench.execution.adapt import Adapted
from fcl_bench.execution.drift import drift_matrix
from fcl_bench.execution.folder import SCHEMA, Table
from fcl_bench.execution.inputs import Inputs
from fcl_bench.execution.plan import Plan
from fcl_bench.execution.run_json import (
    TASK_AGNOSTIC,
    ClientAccuracy,
    Drift,
    Privacy,
    Result,
    Routing,
    ValidationSamples,
)
from fcl_bench.protocol.compute import COUNTED
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.method import Server
from fcl_bench.training.knobs import precision_of

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


def run_record(
    plan: Plan, federation: Federation, inputs: Inputs, processes: Mapping[str, Any], seconds: float
) -> Result:
    """Everything but the checksums of the run's files."""
    settings, scalars, state = plan.settings, plan.settings.scalars, federation.state
    dataset, device, features = plan.dealt.dataset, plan.context.device, inputs.features
    tests = federation.stream.test_sizes
    pure, clients = federation.server.pure_batches, accuracy_by_client(federation, plan.dealt.shards)
    return {
        "schema": SCHEMA,
        "run_id": plan.id,
        **configured(settings),  # type: ignore[typeddict-item]
        "data_fingerprint": plan.fingerprint,
        "data_origin": dataset.origin,
        "unseen_test_samples": plan.dealt.stream.unseen_tests,
        "class_samples": plan.dealt.stream.class_samples.tolist(),
        "partition_skew": skew(settings.partition, plan.dealt.stream.train_columns, plan.dealt.shards),
        "features": plan.identity,
        "weights": inputs.weights or plan.identity.get("weights"),
        "precision": {
            "method": precision_of(settings.method, device),
            "adapt": precision_of(settings.adapt, device) if settings.adapt.trains_network else None,
            "features": inputs.precision,
        },
        "draws_weights": settings.backbone.draws_weights,
        "checkpoint": plan.checkpoint,
        "protocol": TASK_AGNOSTIC if pure is None else f"task-pure batches of {pure}",
        "metrics": metrics(state.answers["correct"], tests),
        "validation": _validation(plan, federation),
        "gates": state.gates["found"],
        "task_aware": metrics(state.answers["aware"], tests),
        "routing": _routing(state.answers, tests),
        "client_accuracy": None if clients is None else over_clients(clients[-1]),
        "adaptation": None if inputs.adapted is None else inputs.adapted.record(inputs.weights),
        "communication": {
            **state.ledger.communication(),
            "wire": asdict(scalars.wire),
            "accounting": settings.method.paper_bytes(plan.context, plan.classes_per_task),
        },
        "dropped": _dropped(federation, inputs),
        "labels": {"rate": scalars.label_rate, **state.ledger.labels()},
        "bounds": federation.audits["bounds"].rows if "bounds" in federation.audits else [],
        "drift": last_drift(federation.audits["drift"].rows, scalars.tasks) if "drift" in federation.audits else None,
        "rounds": federation.rounds.best(),
        "report": report_of(federation.server),
        "client_storage_bytes": state.client_storage_bytes,
        "client_storage_max_bytes": state.client_storage_max_bytes,
        "client_samples_kept": state.client_samples_kept,
        "absences": state.absences,
        "batched_turns": state.batched_turns,
        "privacy": _privacy(plan, federation),
        "compute": _compute(federation, inputs),
        "runtime": {
            **state.ledger.runtime(),
            "feature_seconds": features.seconds if features else 0.0,
            "feature_cost_seconds": features.cost if features else 0.0,
            "feature_cache_hit": features.cache_hit if features else False,
            "cumulative_seconds": _cumulative_seconds(federation, inputs),
            "total_seconds": seconds,
            "peak_memory_bytes": environment.peak_memory(device),
        },
        "environment": environment.describe(device),
        "transport": {"name": settings.transport.name, **processes, **federation.exchange.report()},
    }


def configured(settings: Settings) -> dict[str, Any]:
    """What run.json repeats of config.yaml."""
    groups = ("data", "backbone", "split", "partition", "adapt", "faults", "noise")
    return {
        "method": settings.method.name,
        "method_revision": settings.method.revision,
        **{group: getattr(settings, group).name for group in groups},
        "secure": f"{'simulated' if settings.simulates_sums else 'secure'} sums" if settings.secure.sums else "none",
        **{key: getattr(settings.scalars, key) for key in ("experiment", "track", "profile", "seed")},
        "beta": settings.beta,
        "clients": settings.scalars.clients,
        "tasks": settings.scalars.tasks,
    }


def over_clients(accuracies: np.ndarray) -> ClientAccuracy | None:
    """The summary of the clients' accuracies (K,) after the last task; None if no client has one."""
    known = accuracies[~np.isnan(accuracies)]
    if not len(known):
        return None
    return {
        "clients": len(known),
        "mean": float(known.mean()),
        "std": float(known.std()),
        "least": float(known.min()),
        "most": float(known.max()),
    }


def _validation(plan: Plan, federation: Federation) -> ValidationSamples | None:
    """What was held out of training; None where nothing was."""
    held, sizes, answers = plan.settings.held_out, federation.stream.validation_sizes, federation.state.validation
    if not held.validation:
        return None
    return {
        "share": held.validation,
        "samples": int(sizes.sum()),
        "replaces_test": not held.test,
        "metrics": None if answers is None else metrics(answers["correct"], sizes),
    }


def _dropped(federation: Federation, inputs: Inputs) -> Dropped:
    """How many uploads were dropped, those of the first stage too."""
    ledgers = [federation.state.ledger, *([inputs.adapted.ledger] if inputs.adapted else [])]
    found = [client for ledger in ledgers for client, _ in ledger.dropped()]
    return {"uploads": len(found), "clients": sorted(set(found))}


def _privacy(plan: Plan, federation: Federation) -> Privacy:
    """What the method says (0 if it says nothing), and what its clients' uploads told of single samples."""
    settings, ledger = plan.settings, federation.state.ledger
    at_sites = plan.dealt.dataset.elsewhere
    guarantee = settings.noise.guarantee(settings.method, plan.context, settings.scalars.tasks, ledger, at_sites)
    made = {"synthetic_images": 0, "sample_gradients": 0, "reconstructed_images": 0}
    none = {**ledger.single_samples(), **made, "guarantee": guarantee}
    return cast(Privacy, {**none, **federation.server.privacy()})


def _compute(federation: Federation, inputs: Inputs) -> Compute:
    """What clients and the server computed, and the samples of which a frozen network made features."""
    state, held = federation.state, sum(held_samples(federation))
    counts = {"client": state.client_counts, "server": state.server_counts}
    found = {f"{who}_{what}": own.get(what, 0) for who, own in counts.items() for what in COUNTED}
    return cast(Compute, {**found, "client_samples_extracted": 0 if inputs.precision is None else held})


def _routing(answers: Predictions, tests: np.ndarray) -> Routing | None:
    """How often a method that predicts tasks is right, and its accuracy when all classes compete."""
    if not answers.routes:
        return None
    unrouted = metrics(answers["unrouted"], tests)
    return cast(Routing, {**routed(answers["routed"], tests), "unrouted": unrouted})


def routed(correct: np.ndarray, tests: np.ndarray) -> dict[str, list[float | None]]:
    """How often the right task was named, given how often by task (T, T), of (T,) test samples."""
    by_task = finite(accuracy_matrix(correct, tests)[-1])
    return {"accuracy": finite(pooled_accuracy(correct, tests)), "by_task": by_task}


def _cumulative_seconds(federation: Federation, inputs: Inputs) -> list[float]:
    """The seconds of all clients and the server up to each task; samples share extraction's cost evenly."""
    cost = inputs.features.cost / (len(inputs.train) + len(inputs.test)) if inputs.features else 0.0
    totals = [federation.state.ledger.task_totals(task.index) for task in federation.stream.tasks]
    seconds = [
        total["client_seconds"] + total["server_seconds"] + cost * count
        for total, count in zip(totals, held_samples(federation), strict=True)
    ]
    return np.cumsum(seconds).tolist()


def last_drift(rows: Sequence[Mapping[str, Any]], tasks: int) -> Drift:
    """The drift after the last of so many tasks, given the rows of drift.csv."""
    last = drift_matrix(rows, tasks)[-1, :-1]
    return {"last": [float(value) for value in last], "mean": float(last.mean()) if len(last) else None}


def report_of(server: Server) -> dict[str, Any]:
    """The method's own entries in the run record. Raises a `UserError` if JSON cannot hold them."""
    report = server.report()
    try:
        json.dumps(report, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{type(server).__name__}.report: {error}",
            "numbers, texts, lists and mappings, None where a number is not defined",
        ) from error
    return report
