"""Audits compare a method with the truth. An audit sees all data, so it is not part of the method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fcl_bench.protocol.context import ClientData, Task
from fcl_bench.protocol.method import Server


@dataclass(frozen=True)
class FullData:
    """All data at once; nobody in the federation sees this much.

    Attributes:
        tests: returns batches (n, ...) of the test samples of all tasks so far.
        train: indices of training samples (n,) -> the samples (n, ...) on the device.
    """

    tests: Callable[[], Iterable[torch.Tensor]]
    train: Callable[[np.ndarray], torch.Tensor]


class Audit(ABC):
    """Measures something about a method beside its run.

    The engine calls `observe` for every client's labelled samples during the first round of a task, `look` after each
    round, and `report` after each task.

    Attributes:
        rows: the measurements so far, as JSON; they are part of the run's checkpoint.
    """

    rows: list[dict[str, Any]]

    def observe(self, task: Task, client_data: ClientData) -> None:  # noqa: B027
        """Take in what a client learnt from (pseudo-labelled samples included)."""

    def look(self, task: Task, round_: int, server: Server) -> None:  # noqa: B027
        """The server has finished a round."""

    @abstractmethod
    def report(self, task: Task, server: Server, everything: FullData) -> None:
        """Measure after a task, and add to `rows`; null for what is not finite."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything besides `rows` that a resumed run needs after `report`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""
