"""What `fcl-bench tune` searches, and how Optuna is asked: ranges, a study that goes on, pruning after tasks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fcl_bench.errors import UserError, installing
from fcl_bench.files import json_hash
from fcl_bench.tracking.base import TrackedRun, Tracker, Tracking

_FORMS = "log(1e-4,1), uniform(0,1), int(1,8), int_log(8,512), choice(a,b) or a,b"
#: Trials that are complete before any is pruned.
_UNPRUNED = 4


@dataclass(frozen=True)
class Range:
    """What one key may be.

    Attributes:
        kind: log, uniform, int, int_log or choice.
        values: least and most; of a choice, all.
    """

    kind: str
    values: tuple[str, ...]

    def asked(self, trial: Any, key: str) -> str:
        """The value that Optuna suggests, as it is typed: numbers with three digits that count."""
        if self.kind == "choice":
            return str(trial.suggest_categorical(key, list(self.values)))
        low, high = map(float, self.values)
        if self.kind.startswith("int"):
            return str(trial.suggest_int(key, int(low), int(high), log=self.kind == "int_log"))
        return f"{trial.suggest_float(key, low, high, log=self.kind == 'log'):.3g}"

    @property
    def least(self) -> str:
        """One of its values."""
        return self.values[0]


def parse_range(override: str) -> tuple[str, Range] | None:
    """Key and range of `key=log(1e-4,1)` and the like; None for a single value.

    Raises:
        UserError: a range without two ends, in the wrong order, or on a logarithmic scale from 0.
    """
    key, _, value = override.partition("=")
    found = re.fullmatch(r"(log|uniform|int|int_log|choice)\((.*)\)", value)
    if found is None:
        listed = "," in value and value[:1] not in ("[", "{", "'", '"') and "(" not in value
        return (key, Range("choice", tuple(value.split(",")))) if listed else None
    kind, values = found[1], tuple(part.strip() for part in found[2].split(","))
    if kind == "choice":
        return key, Range(kind, values)
    try:
        low, high = map(float, values)
    except ValueError as error:
        raise UserError(f"{override} is no range", _FORMS) from error
    whole = low.is_integer() and high.is_integer() if abs(low) + abs(high) < float("inf") else False
    if not low < high or (kind.endswith("log") and low <= 0) or (kind.startswith("int") and not whole):
        raise UserError(f"{override} is no range", f"the smaller end first, above 0 for log, whole for int: {_FORMS}")
    return key, Range(kind, values)


def require_optuna() -> ModuleType:
    """Optuna. Raises a `UserError` that says how to install it."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise UserError("fcl-bench tune needs optuna, which is not installed", installing("tune")) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(folder: Path, name: str, content: dict[str, Any], higher: bool) -> Any:
    """The study `name` in a file of `folder`, made if need be; trials that a killed process left are asked again.

    Args:
        content: what it searches and with what; a study of other content under that name is refused.
        higher: whether more of what is measured is better.
    """
    optuna = require_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=name,
        # A file of JSON lines; nothing in it is unpickled.
        storage=JournalStorage(JournalFileBackend(str(folder / f"{name}.journal"))),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=_UNPRUNED),
        direction="maximize" if higher else "minimize",
        load_if_exists=True,
    )
    digest = json_hash(content)
    if study.user_attrs.setdefault("content", digest) != digest:
        raise UserError(f"--study {name} searches something else", "another --study NAME, or the same keys and ranges")
    study.set_user_attr("content", digest)
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.enqueue_trial(trial.params)
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.set_user_attr("interrupted", [*study.user_attrs.get("interrupted", []), trial.number])
    # The draws of the first trials are not made again by a process that goes on.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.get_trials(deepcopy=False)), n_startup_trials=_UNPRUNED)
    return study


def ended(study: Any) -> list[Any]:
    """The trials that are over: complete, pruned or failed; not those that an interruption ended."""
    interrupted = set(study.user_attrs.get("interrupted", []))
    return [trial for trial in study.get_trials() if trial.state.is_finished() and trial.number not in interrupted]


@dataclass
class Pruning:
    """Tells a trial the accuracy after each task, and ends the run if the trial has fallen behind the others.

    Attributes:
        trial: Optuna's.
        first: number of the run's first task among those of the trial's runs.
        also: who else is told how the run goes.
    """

    trial: Any
    first: int
    also: Tracking

    def start(self, run: TrackedRun) -> Tracker:
        """See `Tracking`."""
        return _Watched(self.trial, self.first, self.also.start(run))


class _Watched(Tracker):
    def __init__(self, trial: Any, first: int, also: Tracker) -> None:
        self._trial, self._first, self._also = trial, first, also

    def task(self, metrics: dict[str, float], step: int) -> None:
        self._also.task(metrics, step)
        if "accuracy" not in metrics:
            return
        self._trial.report(metrics["accuracy"], self._first + step)
        if self._trial.should_prune():
            raise require_optuna().TrialPruned(f"after task {step + 1}, at {metrics['accuracy']:.2f} %")

    def finish(self, metrics: dict[str, float]) -> None:
        self._also.finish(metrics)

    def close(self) -> None:
        self._also.close()
