"""Right answers on each task's test set after each task, under each way of asking."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fcl_bench.protocol.method import Prediction

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
        # A task's counts lie together: what is known after it never changes again.
        self._counts = np.zeros((tasks, len(WAYS), tasks), dtype=np.int64)
        self.routes = False

    def __getitem__(self, way: str) -> np.ndarray:
        return self._counts[:, WAYS.index(way)]

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
            self[way][after] += np.bincount(true_tasks[hits].cpu().numpy(), minlength=len(self[way]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answers):
            return NotImplemented
        return self.routes == other.routes and np.array_equal(self._counts, other._counts)

    def state(self) -> dict[str, Any]:
        """What is no count, as JSON."""
        return {"routes": self.routes}

    def tensor(self, done: int) -> torch.Tensor:
        """(done, 4, T): the rows of the first `done` tasks, of each of `WAYS`, which never change again."""
        return torch.from_numpy(self._counts[:done])

    def restore(self, state: dict[str, Any], rows: torch.Tensor) -> None:
        """Take over what `state` and `tensor` returned."""
        self.routes = bool(state["routes"])
        self._counts[: len(rows)] = rows.numpy()


def _best_of(prediction: Prediction, classes: list[torch.Tensor], tasks: torch.Tensor) -> torch.Tensor:
    """The best class (n,) among those of each sample's task."""
    if prediction.heads is None:
        member = prediction.scores.new_zeros(len(classes), prediction.scores.shape[1], dtype=torch.bool)
        sizes = torch.tensor([len(columns) for columns in classes], device=tasks.device)
        task_of = torch.arange(len(classes), device=tasks.device).repeat_interleave(sizes)
        member[task_of, torch.cat(classes)] = True
        return prediction.scores.masked_fill(~member[tasks], -torch.inf).argmax(dim=1)
    best = torch.empty_like(tasks)
    for task, columns in enumerate(classes):
        chosen = tasks == task
        best[chosen] = columns[prediction.heads[task][chosen].argmax(dim=1)]
    return best
