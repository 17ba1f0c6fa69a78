"""FOT: orthogonal training (Bakman et al., 2024) as FedProTIP describes it: only the aggregated update is projected.

Clients train freely. After a task each sends a random sketch of its activation columns; the server needs only their
sum, which secure aggregation can compute, and takes the subspaces from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import require_memory
from fcl_bench.linalg.subspace import core_basis
from fcl_bench.methods.gradient.projected import MASSES, ProjectedClient, ProjectedMethod, ProjectedServer
from fcl_bench.protocol.expected import Expected, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.problem import Problem, Shard, State
from fcl_bench.randomness import derived_seed


class FOTClient(ProjectedClient):
    """Plain local training; sketches A_k = X_k G_k, G_k standard normal (m_s, 5 d_l)."""

    method: FOT

    def answer(self, shard: Shard, broadcast: Message, state: State) -> tuple[Message, State]:
        found = {}
        for layer, columns in self.columns_of(shard).items():
            seed = derived_seed(self.problem.seed, f"sketch {layer}", shard.task, shard.client)
            shape = columns.shape[1], self.method.width(len(columns))
            G = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=columns.dtype)
            found[layer] = columns @ G.to(columns.device)
        return Message(found, summed=found, moments_of=dict.fromkeys(found)), state


class FOTServer(ProjectedServer):
    """Takes the subspaces from the sum of the sketches; projecting the average is all of FOT's projection."""

    method: FOT

    def expects_basis(self, layer: str, side: int) -> Expected:
        return real(side, self.method.width(side))

    def absorb_answer(self, client: int, upload: Message) -> None:
        for layer, sketch in upload.items():
            self.received[layer] = self.received[layer] + sketch if layer in self.received else sketch

    def new_basis(self, layer: str, received: torch.Tensor) -> torch.Tensor:
        total = received.double()
        before, epsilon, wire = self.basis_before(layer, total), self.method.epsilon(self.task), self.problem.wire.dtype
        return core_basis(total, before, epsilon, self.method.power, rounded_to=wire)[0]


@dataclass
class FOT(ProjectedMethod):
    """Knobs of FOT.

    Args:
        sketch: columns of a layer's sketch as a multiple of d_l.
    """

    name: ClassVar[str] = "fot"
    client_half = FOTClient
    server_half = FOTServer

    threshold: float = knob(0.87, above=0, most=1)
    threshold_step: float = knob(0.01, least=0)
    mass: str = knob("energy", choices=MASSES)
    sketch: float = knob(5.0, above=0)

    def width(self, side: int) -> int:
        """Columns of the sketch of a layer with inputs of d_l = `side` numbers."""
        return max(1, round(self.sketch * side))

    def check(self, problem: Problem, classes_per_task: list[int]) -> None:
        super().check(problem, classes_per_task)
        widest = max(self.widths(self.build_network(problem)).values())
        require_memory(f"method.sketch={self.sketch:g}", 8 * widest * self.width(widest), "the widest layer's sketch")
