"""What a server asks clients for only once: it does so in the first task in which anyone answers."""

from __future__ import annotations

import torch

from fcl_bench.protocol.task import Task


class QueryTasks:
    """The tasks that begin with a question, or end with it: the first one, and others until anyone has answered.

    A task stays among them, so that the rounds of earlier tasks do not change.
    """

    def __init__(self) -> None:
        self._tasks = {0}

    def __contains__(self, task: Task) -> bool:
        return task.index in self._tasks

    def add(self, task: Task) -> None:
        """Ask in this task, too, since nobody has answered yet."""
        self._tasks.add(task.index)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Their numbers, for a checkpoint."""
        return {"tasks": torch.tensor(sorted(self._tasks))}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""
        self._tasks = set(state["tasks"].tolist())
