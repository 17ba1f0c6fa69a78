"""FedNCM: nearest class mean (Legate et al., "Guiding The Last Layer in Federated Learning with Pre-Trained Models").

One round per task. Each client sends its class sums and counts; the server adds them up and classifies by the nearest
mean, by cosine or Euclidean distance. It has no second-order part, and is the baseline of the closed-form methods.
The linear discriminants are built on what it has: class means, and classes without a sample.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.gram import add_class_sums
from fcl_bench.linalg.solve import Solution
from fcl_bench.methods.closed_form.base import ClosedFormClient, ClosedFormMethod, ClosedFormServer, counted
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.fields import CLASSES, COLUMN, COUNT, SUM, Field, Schema, counts
from fcl_bench.protocol.message import Message


class DiscriminantServer(ClosedFormServer):
    """A `ClosedFormServer` that counts, and whose scores are h'w_c + b_c.

    Attributes:
        n: (C,) samples of each class so far; noise of the clients may make it any number, also a negative one.
        uploads: the number of uploads so far, counting those inside sums.
    """

    state: ClassVar[Sequence[str]] = ("n", "uploads")
    by_class = ("B", "n")

    def __init__(self, method: ClosedFormMethod, context: Context) -> None:
        super().__init__(method, context)
        self.n = torch.zeros(0, dtype=torch.int64, device=context.device)
        self.uploads = 0

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


class FedNCMClient(ClosedFormClient):
    """First-order statistics of the client's samples."""

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """S = H'Y (M, c_t) and the counts n (c_t)."""
        columns = broadcast["columns"]
        sums = client_data.inputs.new_zeros(len(columns), self.dimension)
        for H, which in self.blocks(client_data, broadcast):
            add_class_sums(sums, H, which)
        return Message({"S": sums.T, "n": counted(client_data, columns)}), state


class FedNCMServer(DiscriminantServer):
    """mu_c = S_c / n_c, and the scores of the nearest mean."""

    method: FedNCM
    absorbs_late = True

    def solution(self) -> Solution:
        """The means, scaled to length 1 for the cosine. No system is solved, so none can be ill-conditioned."""
        means = self.means()
        return Solution(torch.nn.functional.normalize(means, dim=0) if self.method.cosine else means, 1.0)

    def biases(self) -> torch.Tensor:
        """-|mu_c|^2 / 2 for the distance, 0 for the cosine."""
        return torch.zeros_like(self.W[0]) if self.method.cosine else -self.W.square().sum(dim=0) / 2

    def scores(self, H: torch.Tensor) -> torch.Tensor:
        """cos(h, mu_c), or h'mu_c - |mu_c|^2 / 2 = (|h|^2 - |h - mu_c|^2) / 2."""
        return super().scores(torch.nn.functional.normalize(H, dim=1) if self.method.cosine else H)


@dataclass
class FedNCM(ClosedFormMethod):
    name: ClassVar[str] = "fedncm"
    client_half = FedNCMClient
    server_half = FedNCMServer
    ignores_partition = True

    M: int | None = knob(None, least=1)
    similarity: str = knob("cosine", choices=("cosine", "euclid"))

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        shape, least = ("M", "c"), self.least_feature
        S = Field(shape, least=least, combine=SUM, one_sample=COLUMN, columns=CLASSES, zero_without="n")
        return {"statistics": {"S": S, "n": counts("c", combine=SUM, one_sample=COUNT)}}

    @property
    def cosine(self) -> bool:
        """Whether scores are cosines."""
        return self.similarity == "cosine"

    def matrices(self) -> int:
        return 0
