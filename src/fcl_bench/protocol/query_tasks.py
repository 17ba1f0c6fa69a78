"""What a server asks clients for only once: it does so in the first task in which anyone answers."""

from __future__ import annotations

from fcl_bench.protocol.task import Task


class QueryTasks:
    """The tasks that begin with a question, or end with it: the first one, and others until anyone has answered.

    A task stays among them, so that the rounds of earlier tasks do not change.
    """

    state = ("tasks",)

    def __init__(self) -> None:
        self.tasks = {0}

    def __contains__(self, task: Task) -> bool:
        return task.index in self.tasks

    def add(self, task: Task) -> None:
        """Ask in this task, too, since nobody has answered yet."""
        self.tasks.add(task.index)
