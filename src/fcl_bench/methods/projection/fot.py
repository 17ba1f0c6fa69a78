"""FOT: orthogonal training (Bakman et al., 2024) as FedProTIP describes it: only the aggregated update is projected.

Clients train freely. After a task each sends a random sketch of its activation columns; the server needs only their
sum, which secure aggregation can compute, and takes the subspaces from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import require_memory
from fcl_bench.methods.projection.projected import (
    BASES,
    MASSES,
    ProjectedClient,
    ProjectedMethod,
    ProjectedServer,
    bases_in,
)
from fcl_bench.methods.projection.subspace import core_basis
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import MOMENTS, SUM, Field, Schema, real
from fcl_bench.protocol.message import Message
from fcl_bench.training.layer_inputs import layer_grams
from fcl_bench.training.trainer import forward_batch

#: The field in which clients send how much of each layer's inputs is outside the bases.
OUTSIDE = "outside"


class FOTClient(ProjectedClient):
    """Plain local training; sketches A_k = X_k G_k, G_k standard normal (m, 5 d_l)."""

    method: FOT

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """A sketch of each layer; if the threshold is a share of the inputs, also how much of these is new."""
        found, outside = {}, []
        for layer, (X, gram) in self._inputs(client_data).items():
            found[layer] = self.sketched(client_data, layer, X)
            outside.append(_new_share(gram, bases_in(broadcast, layer)))
        if self.method.share_of == "rest":
            return Message(found), state
        samples = len(client_data.labels)
        found[OUTSIDE] = samples * torch.tensor(outside, dtype=torch.float64)
        return Message(found, samples=samples), state

    def _inputs(self, client_data: ClientData) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """X (d_l, m) and X X' by layer.

        If all inputs are sketched, X is a root (d_l, d_l) of their X X'. Its product with normal numbers has their law.
        """
        if self.method.columns is not None:
            return {layer: (X, X @ X.T) for layer, X in self.columns_of(client_data).items()}
        names = self.method.widths(self.network, self.context.recurring)
        layers = {layer: self.network.get_submodule(layer) for layer in names}
        batches = self.images_of(client_data).split(forward_batch(self.context.device))
        grams = layer_grams(self.trainer, self.network, batches, layers)
        # In the order of the layers, which need not be that in which the network calls them.
        return {layer: (_root(grams[layer]), grams[layer]) for layer in names}


def _root(gram: torch.Tensor) -> torch.Tensor:
    """R with R R' = gram, symmetric and positive semidefinite."""
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp(min=0).sqrt()


def _new_share(gram: torch.Tensor, Phi: torch.Tensor | None) -> float:
    """||X - Phi Phi' X|| / ||X|| of inputs X with X X' = `gram`; 0 for inputs that are all zero."""
    whole = float(gram.trace())
    if Phi is None or whole <= 0:
        return float(whole > 0)
    inside = float(((gram @ Phi.double()) * Phi).sum())
    return max(0.0, 1 - inside / whole) ** 0.5


class FOTServer(ProjectedServer):
    """Takes the subspaces from the sum of the sketches. FOT projects nothing but the average."""

    method: FOT

    def __init__(self, method: FOT, context: Context) -> None:
        super().__init__(method, context)
        #: Of the uploads of the stage `BASES`.
        self._samples = 0

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self._samples = 0

    def schema(self, task: Task, stage: str) -> Schema:
        found = super().schema(task, stage)
        if OUTSIDE not in found:
            return found
        return {**found, OUTSIDE: found[OUTSIDE].sized({"layers": len(found) - 1})}

    def objection(self, upload: Message) -> str:
        if self.stage == BASES and self.method.share_of == "inputs" and not upload.samples:
            return "it does not say of how many samples its inputs are"
        return super().objection(upload)

    def absorb_answer(self, client: int, upload: Message) -> None:
        for name, value in upload.items():
            self.received[name] = self.received[name] + value if name in self.received else value
        self._samples += upload.samples or 0

    def new_basis(self, layer: str, received: torch.Tensor) -> torch.Tensor:
        epsilon = self.method.epsilon(self.task)
        if self.method.share_of == "inputs":
            # Over all clients, samples times the share of the layer's inputs that is new.
            outside = float(self.received[OUTSIDE][list(self.widths()).index(layer)])
            epsilon = share_of_rest(epsilon, outside / max(1, self._samples))
        wire, below = self.context.wire.dtype, self.method.variant == "published"
        known = self.known(layer)
        return core_basis(received.double(), known, epsilon, self.method.power, rounded_to=wire, below=below)[0]


def share_of_rest(epsilon: float, outside: float) -> float:
    """The threshold outside the bases that a threshold `epsilon` of all inputs implies:

    (outside - (1 - epsilon)) / outside.

    `outside` is a share of norms, as FOT's code has it, though the threshold is one of squares. If the result is not
    above 0, nothing is added.
    """
    return (outside - (1 - epsilon)) / outside if outside > 0 else 0.0


@dataclass
class FOT(ProjectedMethod):
    name: ClassVar[str] = "fot"
    search: ClassVar[Mapping[str, str]] = {"threshold": "uniform(0.5,0.95)"}
    client_half = FOTClient
    server_half = FOTServer

    threshold: float = knob(0.87, above=0, most=1)
    mass: str = knob("energy", choices=MASSES)
    columns: int | None = knob(512, least=1)  # type: ignore[assignment]
    sketch: float = knob(5.0, above=0)

    @property
    def basis(self) -> Field:
        return real(combine=SUM, leaks=MOMENTS)

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = super().uploads(context)
        if self.share_of == "inputs":
            # Samples times a share of norms.
            stages[BASES] = {**stages[BASES], OUTSIDE: real("layers", least=0, per_sample=1.0, combine=SUM)}
        return stages

    def sketch_width(self, side: int) -> int:
        return max(1, round(self.sketch * side))

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        widest = max(self.widths(self.build_network(context), context.recurring).values())
        require_memory(
            f"method.sketch={self.sketch:g}", 8 * widest * self.sketch_width(widest), "the widest layer's sketch"
        )
