"""Test results class by class, client by client and sample by sample, after each task."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from fcl_bench.data.partitions.base import Holdings
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import class_accuracy, client_accuracy
from fcl_bench.execution.run_json import ClientAccuracy


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


def clients_summary(federation: Federation, shards: Sequence[Holdings]) -> ClientAccuracy | None:
    """run.json's `client_accuracy`; None if no client has an accuracy."""
    matrix = accuracy_by_client(federation, shards)
    known = np.zeros(0) if matrix is None else matrix[-1][~np.isnan(matrix[-1])]
    if not len(known):
        return None
    return {
        "clients": len(known),
        "mean": float(known.mean()),
        "std": float(known.std()),
        "least": float(known.min()),
        "most": float(known.max()),
    }


def confusion_arrays(federation: Federation) -> dict[str, np.ndarray]:
    """confusion.npz: `after`, `label`, `answer`, `samples` (n,) of the counts that are not 0, and `class_order` (C,).

    After task `after`, `samples` test samples of class `label` were classified as `answer`, both as columns.
    """
    rows = federation.state.answers.confusion.array
    named = {name: rows[name] for name in rows.dtype.names or ()}
    return {**named, "class_order": federation.stream.class_order}


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
