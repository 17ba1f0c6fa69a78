"""Right answers on each task's test set after each task, under each way of asking."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fcl_bench.methods.base import Prediction

#: The ways of asking. `correct`: as the method predicts; `aware`: the sample's task is given, and only its classes
#: compete (under the task's own head, if it has one); `unrouted`: all classes seen compete, whatever task the method
#: thinks of; `routed`: whether the method named the right task.
WAYS = ("correct", "aware", "unrouted", "routed")


class Answers:
    """Counts (T, T) int64 for each of `WAYS`: row t, column tau counts the test set of task tau after task t.

    Attributes:
        routes: whether the method names tasks at all; without, `routed` means nothing and `unrouted` is `correct`.
    """

    def __init__(self, tasks: int) -> None:
        self._counts = {way: np.zeros((tasks, tasks), dtype=np.int64) for way in WAYS}
        self.routes = False

    def __getitem__(self, way: str) -> np.ndarray:
        return self._counts[way]

    def add(
        self,
        after: int,
        prediction: Prediction,
        columns: torch.Tensor,
        true_tasks: torch.Tensor,
        classes: list[torch.Tensor],
    ) -> None:
        """Count a batch.

        Args:
            after: index of the last task learnt.
            prediction: of n samples.
            columns: (n,) their true classes; a class not seen yet is never answered.
            true_tasks: (n,) the tasks whose test samples they are.
            classes: per task so far, the columns of its classes, ascending.
        """
        tasks = prediction.tasks
        right = {
            "unrouted": prediction.scores.argmax(dim=1) == columns,
            "aware": _best_of(prediction, classes, true_tasks) == columns,
        }
        right["correct"] = right["unrouted"]
        if tasks is not None:
            self.routes = True
            right["correct"] = _best_of(prediction, classes, tasks) == columns
            right["routed"] = tasks == true_tasks
        for way, hits in right.items():
            self._counts[way][after] += np.bincount(true_tasks[hits].cpu().numpy(), minlength=len(self[way]))

    def state(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {"routes": self.routes, **{way: counts.tolist() for way, counts in self._counts.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.routes = bool(state["routes"])
        self._counts = {way: np.array(state[way], dtype=np.int64) for way in WAYS}


def _best_of(prediction: Prediction, classes: list[torch.Tensor], tasks: torch.Tensor) -> torch.Tensor:
    """The best class (n,) among those of each sample's task."""
    if prediction.heads is None:
        member = prediction.scores.new_zeros(len(classes), prediction.scores.shape[1], dtype=torch.bool)
        for task, columns in enumerate(classes):
            member[task, columns] = True
        return prediction.scores.masked_fill(~member[tasks], -torch.inf).argmax(dim=1)
    best = torch.empty_like(tasks)
    for task, columns in enumerate(classes):
        chosen = tasks == task
        best[chosen] = columns[prediction.heads[task][chosen].argmax(dim=1)]
    return best
