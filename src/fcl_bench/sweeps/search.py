"""The search of `fcl-bench tune` with Optuna: ranges, a study that can be continued, pruning after tasks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from fcl_bench.config import number_text
from fcl_bench.errors import UserError, installing
from fcl_bench.files import json_hash
from fcl_bench.tracking import TrackedRun, Tracker

_FORMS = "log(1e-4,1), uniform(0,1), int(1,8), int_log(8,512), choice(a,b) or a,b"
#: The number of complete trials before any trial is pruned.
_UNPRUNED = 4
#: Of the rules of a search: raised when the same search may choose otherwise than before.
RULES = 2


@dataclass(frozen=True)
class Range:
    """The range of one key.

    Attributes:
        kind: log, uniform, int, int_log or choice.
        values: the least and the largest value; for a choice, all values.
    """

    kind: str
    values: tuple[str, ...]

    def suggested(self, trial: Any, key: str) -> str:
        """The value that Optuna suggests, as it is typed.

        A number has three significant digits, or as many as it needs to stay in a narrow range.
        """
        if self.kind == "choice":
            return str(trial.suggest_categorical(key, list(self.values)))
        low, high = map(float, self.values)
        if self.kind.startswith("int"):
            return str(trial.suggest_int(key, int(low), int(high), log=self.kind == "int_log"))
        value = trial.suggest_float(key, low, high, log=self.kind == "log")
        rounded = (f"{value:.{digits}g}" for digits in range(3, 18))  # 17 digits are the value itself
        return next(text for text in rounded if self.has(text))

    def has(self, typed: str) -> bool:
        """Whether a value, as it is typed, is among the choices or between the ends."""
        if self.kind == "choice":
            return number_text(typed) in map(number_text, self.values)
        try:
            return float(self.values[0]) <= float(typed) <= float(self.values[1])
        except ValueError:  # null, auto
            return False


def parse_range(override: str) -> tuple[str, Range] | None:
    """Parse key and range of `key=log(1e-4,1)` and the like; None for a single value.

    Raises:
        UserError: the range lacks two ends, has them in the wrong order, or is logarithmic and starts at 0.
    """
    key, _, value = override.partition("=")
    found = re.fullmatch(r"(log|uniform|int|int_log|choice)\((.*)\)", value)
    if found is None:
        if dotted := re.fullmatch(r"([-+.\de]+?)(?:e0)?\.\.([-+.\de]+)", value):
            raise UserError(
                f"{override} is no range", f"did you mean '{key}=log({dotted[1]},{dotted[2]})'? Others: {_FORMS}"
            )
        listed = "," in value and value[:1] not in ("[", "{", "'", '"') and "(" not in value
        return (key, Range("choice", tuple(value.split(",")))) if listed else None
    kind, values = found[1], tuple(part.strip() for part in found[2].split(","))
    if kind == "choice":
        return key, Range(kind, values)
    try:
        low, high = map(float, values)
    except ValueError as error:
        raise UserError(f"{override} is no range", _FORMS) from error
    numbers = low < high < inf and low > -inf
    whole = numbers and low.is_integer() and high.is_integer()
    if not numbers or (kind.endswith("log") and low <= 0) or (kind.startswith("int") and not whole):
        ends = "two finite ends, the smaller first, above 0 for log, whole for int"
        raise UserError(f"{override} is no range", f"{ends}: {_FORMS}")
    return key, Range(kind, values)


def require_optuna() -> ModuleType:
    """Import Optuna. Raises a `UserError` that says how to install it if it is missing."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise UserError("fcl-bench tune needs optuna, which is not installed", installing("tune")) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(folder: Path, name: str, content: dict[str, Any], higher: bool) -> Any:
    """Open or make the study `name` in a file of `folder`; a trial that a killed process left is asked again.

    Args:
        content: what the study searches and how; a study with the same name and other content is refused.
        higher: whether a higher value is better.
    """
    optuna = require_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    study = optuna.create_study(
        study_name=name,
        # The file has JSON lines; nothing in it is unpickled.
        storage=JournalStorage(JournalFileBackend(str(folder / f"{name}.journal"))),
        direction="maximize" if higher else "minimize",
        load_if_exists=True,
    )
    digest = json_hash(content)
    if study.user_attrs.setdefault("content", digest) != digest:
        raise UserError(f"--study {name} searches something else", "another --study NAME, or the same keys and ranges")
    study.set_user_attr("content", digest)
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.set_user_attr("interrupted", [*study.user_attrs.get("interrupted", []), trial.number])
    return study


def next_trial(study: Any) -> Any:
    """The trial after those that have ended, with values that depend on these alone.

    So a killed search asks the same trials as an uninterrupted one: the sampler's seed is their number.
    """
    study.sampler = require_optuna().samplers.TPESampler(seed=len(ended(study)), n_startup_trials=_UNPRUNED)
    return study.ask()


def ended(study: Any) -> list[Any]:
    """The trials that are complete, pruned or failed, without those that an interruption ended."""
    interrupted = set(study.user_attrs.get("interrupted", []))
    return [trial for trial in study.get_trials() if trial.state.is_finished() and trial.number not in interrupted]


class Pruning(Tracker):
    """Tracking that reports each task's accuracy to a trial, and ends the run if that is below the median of others.

    No run ends in the first half of its tasks: a setting that learns the first task best often forgets it most.

    Args:
        first: the number of the run's first task among all tasks of the trial's runs.
        tasks: how many the run has.
    """

    def __init__(self, trial: Any, first: int, tasks: int, also: Tracker) -> None:
        self._trial, self._first, self._tracking = trial, first, also
        self._unpruned = tasks // 2
        self._also = Tracker()
        self._seen: set[int] = set()

    def start(self, run: TrackedRun) -> Tracker:
        self._also = self._tracking.start(run)
        return self

    def complete(self, accuracies: Sequence[float | None]) -> None:
        """Take in the tasks of a complete run that nobody was told of: those before the run was interrupted, or all."""
        for task, accuracy in enumerate(accuracies):
            if accuracy is not None and task not in self._seen:
                self._report(accuracy, task)

    def _report(self, accuracy: float, task: int) -> None:
        """Report an accuracy; raises Optuna's `TrialPruned` where the trial has fallen behind."""
        self._seen.add(task)
        number = self._first + task
        self._trial.report(accuracy, number)
        # Optuna's own rule takes a trial's best accuracy so far, which is nearly always that after the first task.
        complete = require_optuna().trial.TrialState.COMPLETE
        done = [trial.intermediate_values for trial in self._trial.study.get_trials(states=[complete])]
        others = [values[number] for values in done if number in values]
        late = task >= self._unpruned and len(done) >= _UNPRUNED
        if late and others and accuracy < statistics.median(others):
            raise require_optuna().TrialPruned(f"after task {task + 1}, at {accuracy:.2f} %")

    def task(self, metrics: dict[str, float], step: int) -> None:
        self._also.task(metrics, step)
        if "accuracy" in metrics:
            self._report(metrics["accuracy"], step)

    def finish(self, metrics: dict[str, float]) -> None:
        self._also.finish(metrics)

    def close(self) -> None:
        self._also.close()
