"""Which classes each head of a growing network scores, where classes may come back in later tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from fcl_bench.protocol.message import Message


@dataclass(frozen=True)
class Heads:
    """The heads so far: one per task, for the classes that are new in it, or, as FedProTIP has it, for all it has.

    A logit is an output of any head; logits are numbered head by head. Where every class has one logit and no task
    has an old class, logits are columns, and all of this is trivial.

    Attributes:
        columns: per head, the columns of its classes, ascending.
        task: the columns of the classes of the task at hand, ascending; its head is the last.
    """

    columns: tuple[tuple[int, ...], ...]
    task: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Classes of each head."""
        return [len(columns) for columns in self.columns]

    @property
    def logits(self) -> list[int]:
        """The column of each logit."""
        return [column for columns in self.columns for column in columns]

    @property
    def plain(self) -> bool:
        """Whether logits are columns."""
        return self.logits == list(range(len(self.logits)))

    @property
    def reused(self) -> frozenset[int]:
        """Earlier heads that score classes of the task at hand, which its own head does not."""
        back = set(self.task) - set(self.columns[-1])
        return frozenset(head for head, columns in enumerate(self.columns[:-1]) if back & set(columns))

    def resting_rows(self, head: int) -> list[int]:
        """Rows of a reused head whose classes are not in the task at hand."""
        return [row for row, column in enumerate(self.columns[head]) if column not in self.task]

    @lru_cache(maxsize=64)  # noqa: B019 - the same for all clients and rounds of a task
    def competition(
        self, over: str, task: Sequence[int] | None = None, head: int = -1
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which logits compete in the loss on a task's samples, and where each class is among them.

        Args:
            over: "task", the logits of the task's classes; "seen", besides them all logits of other classes. A class
                never competes with itself under another head.
            task: the task's columns; None: of the task at hand.
            head: the task's head.

        Returns:
            (c,) the logits, and (C,) the position of each column's logit in it, -1 for none; None and None where all
            logits compete and are columns.
        """
        task = self.task if task is None else task
        head %= len(self.columns)
        own = self._own(task, head)
        if over == "seen" and self.plain:
            return None, None
        rivals = range(len(self.logits)) if over == "seen" else range(0)
        chosen = sorted({*own, *(logit for logit in rivals if self.logits[logit] not in task)})
        position = torch.full((max(self.logits) + 1,), -1)
        for place, logit in enumerate(chosen):
            position[self.logits[logit]] = place
        return torch.tensor(chosen), position

    def _own(self, task: Sequence[int], head: int) -> list[int]:
        """The logit of each class of a task: its own head's, or that of the head which had the class first."""
        found: dict[int, int] = {}
        for logit, column in enumerate(self.logits):
            found.setdefault(column, logit)
        begin = sum(self.sizes[:head])
        found |= {column: begin + row for row, column in enumerate(self.columns[head])}
        return [found[column] for column in task]

    def class_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """(n, C) of logits (n, L): of a class with several heads the largest."""
        if self.plain:
            return logits
        columns = torch.tensor(self.logits, device=logits.device)
        scores = logits.new_full((len(logits), int(columns.max()) + 1), -torch.inf)
        return scores.scatter_reduce(1, columns.expand(len(logits), -1), logits, "amax")

    def to_message(self) -> dict[str, torch.Tensor]:
        """`classes`, the heads' sizes; where these don't tell, `columns` of all heads and `task`, its columns."""
        message = {"classes": torch.tensor(self.sizes, dtype=torch.int32)}
        if not self.plain or self.task != self.columns[-1]:
            message["columns"] = torch.tensor(self.logits, dtype=torch.int32)
            message["task"] = torch.tensor(self.task, dtype=torch.int32)
        return message

    @staticmethod
    def from_message(message: Message) -> Heads:
        """What `to_message` sent."""
        sizes = message["classes"].tolist()
        columns = parts(message["columns"].tolist() if "columns" in message else range(sum(sizes)), sizes)
        return Heads(tuple(columns), tuple(message["task"].tolist()) if "task" in message else columns[-1])


def parts(columns: Sequence[int], sizes: list[int]) -> list[tuple[int, ...]]:
    """`columns` (L,) in groups of those sizes, such as the columns of each head."""
    if sum(sizes) != len(columns):
        raise ValueError(f"{len(columns)} columns are no groups of {sizes}")
    ends = list(accumulate(sizes))
    return [tuple(columns[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
