"""A task of the stream, as everyone in the federation knows it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """Task t of the stream.

    Attributes:
        index: t, from 0.
        new_columns: the columns of the label matrix that classes which are new in this task take (columns are in order
            of first appearance in the stream).
        columns_seen: C_t, the number of classes seen up to and including this task.
        columns: the columns of all classes that have training samples in the task, ascending; by default the new ones.
        classes: the data set's own numbers of the classes in `new_columns`; by default the columns.
    """

    index: int
    new_columns: range
    columns_seen: int
    columns: tuple[int, ...] = ()
    classes: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", tuple(self.new_columns))
        if not self.classes:
            object.__setattr__(self, "classes", tuple(self.new_columns))
