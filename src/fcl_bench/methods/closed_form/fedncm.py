"""FedNCM: nearest class mean (Legate et al., "Guiding The Last Layer in Federated Learning with Pre-Trained Models").

One round per task. Each client sends its class sums and counts; the server adds them up and classifies by the nearest
mean, by cosine or Euclidean distance. It has no second-order part, and is the floor of the closed-form methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.gram import add_class_sums
from fcl_bench.linalg.solve import Solution
from fcl_bench.methods.closed_form.base import ClosedFormClient, counted
from fcl_bench.methods.closed_form.discriminants import DiscriminantMethod, DiscriminantServer
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.fields import CLASSES, COLUMN, COUNT, SUM, Field, Schema, counts
from fcl_bench.protocol.message import Message


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
class FedNCM(DiscriminantMethod):
    """Knobs of FedNCM.

    Args:
        similarity: "cosine" of a sample and the class mean, or "euclid", their distance.
    """

    name: ClassVar[str] = "fedncm"
    client_half = FedNCMClient
    server_half = FedNCMServer

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
