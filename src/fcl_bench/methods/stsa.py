"""STSA: spatial-temporal statistics aggregation (Guan et al., "Enhancing Federated Class-Incremental Learning ...").

One round per task. Each client sends the exact Gram matrix of its random features and its class sums; the server adds
them up over clients and tasks and solves ridge regression. The result is the centralised one, whatever the partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.errors import require_positive
from fcl_bench.federation.message import Message
from fcl_bench.methods.analytic import AnalyticClient, GramMethod, GramServer, one_hot
from fcl_bench.methods.base import Client, Problem, Server, Shard


@dataclass
class STSA(GramMethod):
    """Knobs of STSA.

    Args:
        M: number of random features; None: the backbone's features themselves, H = Z.
        gamma: ridge coefficient of Eq. 8; 0: the Moore-Penrose solution where the Gram matrix is singular.
    """

    name: ClassVar[str] = "stsa"

    gamma: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("method.gamma", self.gamma, zero=True)

    def client(self, problem: Problem) -> Client:
        return STSAClient(self, problem)

    def server(self, problem: Problem) -> Server:
        return STSAServer(self, problem)


class STSAClient(AnalyticClient):
    """Exact statistics of the client's samples."""

    def update(self, shard: Shard, broadcast: Message) -> Message:
        """G = H'H (M, M) and C = H'Y (M, c_t) over the task's classes."""
        H = self.features(shard, broadcast)
        sums = H.T @ one_hot(shard, broadcast["columns"])
        return Message({"G": H.T @ H, "C": sums}, symmetric=["G"], per_class=["C"])


class STSAServer(GramServer):
    """G adds up over clients (Eq. 2) and tasks (Eq. 4); W = (G + gamma I)^-1 C (Eq. 8)."""

    def __init__(self, method: STSA, problem: Problem) -> None:
        super().__init__(method, problem)
        self._gamma = method.gamma

    def absorb(self, client_id: int, message: Message) -> None:
        self.G += message["G"]
        self.uploads += 1
        self.add_class_sums(message["C"])

    def shift(self) -> float:
        return self._gamma
