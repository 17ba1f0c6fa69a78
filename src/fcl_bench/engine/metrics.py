"""The accuracy matrix, and every metric that the papers derive from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fcl_bench.data.partitions.base import Holdings
from fcl_bench.engine.evaluation import pooled_after

if TYPE_CHECKING:
    from fcl_bench.engine.reports import Metrics


def accuracy_matrix(correct: np.ndarray, tests: np.ndarray) -> np.ndarray:
    """a[t, tau] in percent (T, T), NaN above the diagonal and for a task without test samples.

    Args:
        correct: (T, T) right answers on task tau's test set after task t.
        tests: (T,) sizes of the test sets.
    """
    matrix = _percent(correct, np.broadcast_to(tests, correct.shape))
    return np.where(np.tri(len(tests), dtype=bool), matrix, np.nan)


def pooled_accuracy(correct: np.ndarray, tests: np.ndarray) -> np.ndarray:
    """A_t in percent (T,): accuracy on the pooled test sets of all tasks up to t (FedRAN 2.2); NaN if there is none."""
    return np.array([pooled_after(task, correct, tests) for task in range(len(tests))])


def class_accuracy(confusion: np.ndarray, tasks: int, classes: int) -> np.ndarray:
    """(T, C) in percent: after each task, the share of each class's test samples that are classified as that class.

    NaN for a class that has no test samples yet.
    """
    right, tests = np.zeros((2, tasks, classes), dtype=np.int64)
    np.add.at(tests, (confusion["after"], confusion["label"]), confusion["samples"])
    hits = confusion[confusion["label"] == confusion["answer"]]
    np.add.at(right, (hits["after"], hits["label"]), hits["samples"])
    return _percent(right, tests)


def client_accuracy(by_class: np.ndarray, holdings: Sequence[Holdings], columns: np.ndarray) -> np.ndarray:
    """(T, K) in percent: after each task, the accuracy that a client's own mix of classes would see.

    a_k(t) = sum_c n_kc(t) a_c(t) / sum_c n_kc(t), with n_kc(t) the training samples of class c that client k has had up
    to task t, and a_c(t) the accuracy of the class; classes without a test sample are left out. NaN for a client that
    has no sample of the remaining classes.

    Args:
        by_class: a_c(t) (T, C), see `class_accuracy`.
        columns: (n,) the class of each training sample.
    """
    clients = len(holdings[0])
    found = np.full((len(by_class), clients), np.nan)
    of = [np.repeat(np.arange(clients), own.sizes()) for own in holdings]
    for task, accuracy in enumerate(by_class):
        total, count = np.zeros((2, clients))
        for own, holder in zip(holdings[: task + 1], of, strict=False):
            seen = accuracy[columns[own.indices]]
            tested = ~np.isnan(seen)
            total += np.bincount(holder[tested], weights=seen[tested], minlength=clients)
            count += np.bincount(holder[tested], minlength=clients)
        np.divide(total, count, out=found[task], where=count > 0)
    return found


def _percent(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(100.0 * part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)


def metrics(correct: np.ndarray, tests: np.ndarray) -> Metrics:
    """All metrics in percent, as `Metrics` defines them; None where one is not defined.

    Args:
        correct, tests: see `accuracy_matrix`.

    Tasks without test samples are left out of every mean, as if they were not in the stream; in the series by task
    their entry is None.
    """
    pooled = pooled_accuracy(correct, tests)
    tested = tests > 0
    a = accuracy_matrix(correct, tests)[np.ix_(tested, tested)]
    tasks = len(a)
    by_task = np.array([a[t, : t + 1].mean() for t in range(tasks)])
    learnt = np.diag(a)
    stability = np.array([a[t, :t].mean() if t else np.nan for t in range(tasks)])
    # If no answer on a task was right when it was learnt, its ratio is undefined, then and later.
    with np.errstate(divide="ignore", invalid="ignore"):
        retention = np.array([100 * (a[t, : t + 1] / learnt[: t + 1]).mean() for t in range(tasks)])
    drops = np.array([np.nanmax(a[tau : tasks - 1, tau]) - a[-1, tau] for tau in range(tasks - 1)])
    several = tasks > 1
    return {
        "accuracy": finite(pooled),
        "A_avg": _mean(pooled[tested]),
        "A_T": _last(pooled),
        "A_avg_tasks": _mean(by_task),
        "A_T_tasks": _last(by_task),
        "forgetting": float(drops.mean()) if several else None,
        "forgetting_fedprotip": float(drops.sum() / tasks) if several else None,
        "retention": _last(retention),
        "stability": _mean(stability[1:]),
        "plasticity": _mean(learnt),
        "stability_by_task": _spread(stability, tested),
        "plasticity_by_task": _spread(learnt, tested),
        "retention_by_task": _spread(retention, tested),
    }


def finite(values: np.ndarray) -> list[float | None]:
    """The values (n,), None for one that is not finite."""
    return [float(value) if np.isfinite(value) else None for value in values]


def _spread(values: np.ndarray, tested: np.ndarray) -> list[float | None]:
    """The values of the tasks that have test samples, in the places of these tasks; None in the others."""
    series = np.full(len(tested), np.nan)
    series[tested] = values
    return finite(series)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _last(values: np.ndarray) -> float | None:
    return finite(values[-1:])[0] if len(values) else None
