"""FedDisco: averaging that counts how far a client's classes are from balanced (Ye et al., ICML 2023).

Client k's model has the weight w_k, proportional to ReLU(p_k - a d_k + b). p_k is its share of the samples, d_k the
discrepancy between D_k, its distribution over the task's C classes, and the uniform one; over the clients of a round

    kl:      d_k = KL_k / sum_j KL_j,  KL_k = sum_c D_kc log(D_kc C)
    cosine:  d_k = 1 - cos(D_k, 1/C)
    l1, l2:  d_k = |D_k - 1/C|, of that norm.

If all weights would be 0, they are the p_k. If a client of the round drops out, d_k and p_k stay those over all clients
that were asked, and the weights of the models that came are divided by their sum; where that is 0, by the p_k alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.class_counts import COUNTS, COUNTS_SCHEMA, CountingClient, CountingServer
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.fields import EACH, MEAN, Schema
from fcl_bench.protocol.message import Message

#: `method.discrepancy`
DISCREPANCIES = ("kl", "cosine", "l1", "l2")
#: Times p_k, what a model of weight 0 counts: beside any other weight it is lost to rounding, bit for bit, also after
#: the average is float32; where only such models come, it makes their average that of FedAvg.
_ALONE = 1e-60
#: A warning says that b outweighs the shares if it is at least so many times their mean.
_LARGE = 5


class FedDiscoServer(CountingServer):
    """Weighs models by the clients' counts."""

    method: FedDisco

    def __init__(self, method: FedDisco, context: Context) -> None:
        super().__init__(method, context)
        self._weights: dict[int, float] = {}

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        present = super().participants(task, round_, available)
        self._weights = {}
        if present and self.method.weighs and self.method.stages(task)[round_] == MODEL:
            table = torch.stack([self.counts[client] for client in present])
            found = self.method.weights(table)
            if found is not None:
                weights = torch.where(found > 0, found, _ALONE * self.method.shares(table))
                self._weights = dict(zip(present, weights.tolist(), strict=True))
            self._tell(found, len(present))
        return present

    def _tell(self, weights: torch.Tensor | None, clients: int) -> None:
        """Warn, once each, if a and b leave nothing of the discrepancy or of the shares."""
        a, b = self.method.a, self.method.b
        if weights is None:
            text = f"with method.a={a:g} and method.b={b:g} all weights of a round are 0, and the shares of the samples"
            self._notices.tell("a", f"feddisco: {text} serve instead, as in FedAvg (a smaller a or a larger b)")
        elif b * clients >= _LARGE:
            self._notices.tell(
                "b",
                f"feddisco: method.b={b:g} is {b * clients:g} times the mean share of the samples in a round of"
                f" {clients} clients, and the weights lie between {float(weights.min()):.4f} and"
                f" {float(weights.max()):.4f} (nearly uniform: compare with method=fedavg"
                " method.training.weighting=uniform)",
            )

    def weight(self, client: int, upload: Message) -> float:
        return self._weights[client] if self._weights else super().weight(client, upload)


@dataclass
class FedDisco(GradientMethod):
    name: ClassVar[str] = "feddisco"
    search: ClassVar[Mapping[str, str]] = {"a": "uniform(0,1)"}
    compiles: ClassVar[bool] = True
    averaged_with: ClassVar[str] = "method.a=0 method.b=0, which is method=fedavg"
    client_half = CountingClient
    server_half = FedDiscoServer

    a: float = knob(0.5, least=0)
    b: float = knob(0.1, least=0)
    discrepancy: str = knob("kl", choices=DISCREPANCIES)

    @property
    def weighs(self) -> bool:
        """Whether weights differ from FedAvg's."""
        return bool(self.a or self.b)

    @property
    def aggregation(self) -> str:  # type: ignore[override]
        """Each model has the weight of its client's classes."""
        return EACH if self.weighs else MEAN

    def uploads(self, context: Context) -> dict[str, Schema]:
        return {**super().uploads(context), **({COUNTS: COUNTS_SCHEMA} if self.weighs else {})}

    def stages(self, task: Task) -> list[str]:
        return [*([COUNTS] if self.weighs else []), *super().stages(task)]

    def shares(self, table: torch.Tensor) -> torch.Tensor:
        """p_k (K,) float64 of the clients with `table` (K, C) samples of each class; 1/K with uniform weighting."""
        sizes = table.double().sum(dim=1)
        return sizes / sizes.sum() if self.training.weighting == "samples" else torch.full_like(sizes, 1 / len(sizes))

    def weights(self, table: torch.Tensor) -> torch.Tensor | None:
        """(K,) float64, summing to 1, of the clients of a round, whose samples of each class are `table` (K, C).

        None if all would be 0; the shares then serve as weights.
        """
        weights = (self.shares(table) - self.a * discrepancies(table, self.discrepancy) + self.b).relu()
        return weights / weights.sum() if bool(weights.any()) else None


def discrepancies(table: torch.Tensor, kind: str) -> torch.Tensor:
    """d_k (K,) of the clients with `table` (K, C) samples of each class; at least one each."""
    D = table.double() / table.double().sum(dim=1, keepdim=True)
    uniform = torch.full_like(D, 1 / D.shape[1])
    if kind == "kl":
        found = torch.xlogy(D, D / uniform).sum(dim=1)
        return found / found.sum() if bool(found.any()) else found
    if kind == "cosine":
        return 1 - torch.cosine_similarity(D, uniform, dim=1)
    return torch.linalg.vector_norm(D - uniform, ord={"l1": 1, "l2": 2}[kind], dim=1)
