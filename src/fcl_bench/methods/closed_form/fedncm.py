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
from fcl_bench.methods.closed_form.base import ClosedFormClient, positions
from fcl_bench.methods.closed_form.discriminants import DiscriminantMethod, DiscriminantServer, counted
from fcl_bench.protocol.context import ClientData, State
from fcl_bench.protocol.dp_mechanism import COLUMN, COUNT
from fcl_bench.protocol.fields import Schema, counts, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.task import Task


class FedNCMClient(ClosedFormClient):
    """First-order statistics of the client's samples."""

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """S = H'Y (M, c_t) and the counts n (c_t)."""
        columns = broadcast["columns"]
        sums = client_data.inputs.new_zeros(len(columns), self.dimension)
        for H, which in self.blocks(client_data, broadcast):
            add_class_sums(sums, H, which)
        upload = {"S": sums.T, "n": counted(client_data, columns)}
        return Message(
            upload, per_class=["S"], summed=["S", "n"], sums_of={"S": positions(client_data, columns)}
        ), state


class FedNCMServer(DiscriminantServer):
    """mu_c = S_c / n_c, and the scores of the nearest mean."""

    method: FedNCM
    absorbs_late = True

    def expects(self, task: Task, round_: int) -> Schema:
        return {
            "S": real(self.dimension, len(task.columns), least=self.floor_of_features),
            "n": counts(len(task.columns)),
        }

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
        M: number of random features; None: the backbone's features themselves, H = Z.
        similarity: "cosine" of a sample and the class mean, or "euclid", their distance.
    """

    name: ClassVar[str] = "fedncm"
    client_half = FedNCMClient
    server_half = FedNCMServer
    adds_up = True

    similarity: str = knob("cosine", choices=("cosine", "euclid"))

    @property
    def summands(self) -> Mapping[str, str]:
        return {"S": COLUMN, "n": COUNT}

    @property
    def cosine(self) -> bool:
        """Whether scores are cosines."""
        return self.similarity == "cosine"

    def matrices(self) -> int:
        """0: there is only a vector per class."""
        return 0
