"""Gates: signs that a run is no fair sample of its method.

A run that meets one says so on screen, in run.json and in tables, where it is never the best. They decide nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from fcl_bench.engine.evaluation import Evaluation, Predictions
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.method import Server

if TYPE_CHECKING:
    from fcl_bench.engine.reports import GateState

#: Standard deviations by which an accuracy must differ from chance, and from an earlier one, to count as another.
_SURE = 2.0
#: How many times the root mean square of a tensor may grow from the start of a run, and the least such start: below it
#: weights begin at zero or nearly so.
_MOST_GROWTH, _LEAST_START = 100.0, 0.1
#: The share of a task's rounds after which the accuracy must be that of the end, within so many points.
_EARLIER, _POINTS = 0.75, 2.0
#: A task with fewer rounds is not asked twice, and no more of its samples than these are.
_LEAST_ROUNDS, _PROBED = 4, 1000


def none_yet() -> GateState:
    """The state before the first task."""
    return {"found": [], "starts": {}, "earlier": None}


class Gates:
    """Looks at a server after its tasks and, once, within each."""

    def __init__(self, evaluation: Evaluation, state: GateState) -> None:
        self._evaluation = evaluation
        self._state = state

    def begin(self, task: Task, server: Server) -> None:
        """Before the first round of a task: in a new run, how large the watched tensors are."""
        if not task.index:
            self._state["starts"] = self._state["starts"] or _sizes(server.watched())

    def look(self, task: Task, round_: int, server: Server) -> None:
        """After a round: three quarters of the way, what the model knows of the task."""
        rounds = server.model_rounds(task)
        if len(rounds) >= _LEAST_ROUNDS and round_ == rounds[int(_EARLIER * len(rounds)) - 1]:
            self._state["earlier"] = self._evaluation.right_among(task, server, self._some(task))

    def finish(self, task: Task, server: Server, answers: Predictions) -> None:
        """After the task and its examination: add the gates that it meets."""
        tested, index = self._evaluation.tested, task.index
        own = tested.by_task[index]
        found = [*_chance(int(answers["aware"][index, index]), tested.columns[own]), *self._growth(server)]
        if (earlier := self._state["earlier"]) is not None and len(own):
            some = self._some(task)
            found += _rising(earlier, self._evaluation.right_among(task, server, some), len(some))
            self._state["earlier"] = None
        for gate, text in (*found, *server.gates().items()):
            self._state["found"].append({"gate": gate, "task": index, "text": text})

    def _some(self, task: Task) -> np.ndarray:
        """Some of the task's own samples, spread over all of them: a file may be sorted by class."""
        own = self._evaluation.tested.by_task[task.index]
        return own[:: max(1, -(-len(own) // _PROBED))]

    def _growth(self, server: Server) -> Iterator[tuple[str, str]]:
        starts = self._state["starts"]
        now = _sizes(server.watched())
        most = {name: _MOST_GROWTH * max(starts.get(name, 0.0), _LEAST_START) for name in now}
        grown = {name: size for name, size in now.items() if not size <= most[name]}
        if grown:
            name = max(grown, key=lambda one: grown[one])
            text = f"the root mean square of {name} is {grown[name]:.3g}, from {starts.get(name, 0):.3g}"
            yield "growth", text + (f" ({len(grown)} such tensors)" if len(grown) > 1 else "")


def _sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The root mean square of each tensor."""
    return {
        name: float(tensor.detach().to(torch.float32).square().mean().sqrt())
        for name, tensor in tensors.items()
        if tensor.numel() and tensor.is_floating_point()
    }


def _chance(right: int, columns: np.ndarray) -> Iterator[tuple[str, str]]:
    """Whether so many right answers among the task's classes are what one always answered class would give."""
    if not len(columns):
        return
    _, counts = np.unique(columns, return_counts=True)
    samples, share = len(columns), counts.max() / len(columns)
    if share < 1 and right <= samples * share + _SURE * np.sqrt(samples * share * (1 - share)):
        text = f"{100 * right / samples:.1f} % of the samples just learnt are right, {100 * share:.1f} % by chance"
        yield "chance", text


def _rising(before: int, after: int, samples: int) -> Iterator[tuple[str, str]]:
    """Whether so many right answers of the same samples are more than three quarters of the way through the task."""
    earlier, now = before / samples, after / samples
    rise, deviation = now - earlier, np.sqrt((now * (1 - now) + earlier * (1 - earlier)) / samples)
    if 100 * rise > _POINTS and rise > _SURE * deviation:
        yield "rising", f"its accuracy still rose by {100 * rise:.1f} points in the last quarter of its rounds"
