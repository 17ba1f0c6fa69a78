"""What the nearest class mean and the linear discriminants share: class means, and classes without a sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.methods.closed_form.base import ClosedFormMethod, ClosedFormServer
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.message import Message


class DiscriminantServer(ClosedFormServer):
    """A `ClosedFormServer` that counts, and whose scores are h'w_c + b_c.

    Attributes:
        n: (C,) samples of each class so far; noise of the clients may make it any number, also a negative one.
        uploads: the number of uploads so far, counting those inside sums.
    """

    state: ClassVar[Sequence[str]] = ("n", "uploads")

    def __init__(self, method: ClosedFormMethod, context: Context) -> None:
        super().__init__(method, context)
        self.n = torch.zeros(0, dtype=torch.int64, device=context.device)
        self.uploads = 0

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.n = torch.nn.functional.pad(self.n, (0, task.columns_seen - len(self.n)))

    def absorb(self, client: int, upload: Message) -> None:
        self.add_class_sums(upload["S"])
        self.n[self.columns] += upload["n"]
        self.uploads += upload.clients

    def means(self) -> torch.Tensor:
        """(M, C) mu_c, 0 for a class without a sample."""
        return self.B / self.n.clamp_min(1).to(self.B)

    def intercept(self) -> torch.Tensor:
        """b (..., C). For a class without a sample it is the lowest number there is, so that the class never wins."""
        # The number is halved, so that adding a score cannot make it infinite.
        return self.biases().masked_fill(self.n <= 0, torch.finfo(self.W.dtype).min / 2)

    @abstractmethod
    def biases(self) -> torch.Tensor:
        """b (..., C) of the classes that have samples."""


@dataclass
class DiscriminantMethod(ClosedFormMethod):
    """Knobs of all discriminants; see `ClosedFormMethod`. Their scores are distances, so that no scale fits them."""

    M: int | None = knob(None, least=1)
