"""FedKLDA: kernel discriminants by random Fourier features (KLDA: Momeni, Mazumder and Liu, AAAI 2025), federated.

FedLDA on H = sqrt(2/M) cos(Z Omega + u). The bandwidth of the kernel also comes from sums, in one more exchange in the
first task. An ensemble of E maps averages their posteriors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import require_memory
from fcl_bench.linalg.gram import product
from fcl_bench.linalg.solve import DOUBTFUL, relative_rounding
from fcl_bench.linalg.structure import sums_trouble
from fcl_bench.methods.closed_form.algebra.random_features import FOURIER, mean_squared_distance
from fcl_bench.methods.closed_form.base import projection_seed
from fcl_bench.methods.closed_form.fedlda import FedLDA, FedLDAClient, FedLDAServer
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import SUM, SUMS, Schema, counts, real
from fcl_bench.protocol.message import Message

#: The stage of the first task in which clients send sums for the bandwidth.
BANDWIDTH = "bandwidth"
#: The value of `method.bandwidth` that takes the mean squared distance.
AUTO = "auto"


class FedKLDAClient(FedLDAClient):
    """Exact statistics of the client's Fourier features."""

    method: FedKLDA

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """FedLDA's upload; in the stage that asks for the bandwidth, sum z (d), sum |z|^2 (1) and the number of z."""
        if broadcast.stage != BANDWIDTH:
            return super().update(client_data, broadcast, state)
        z = client_data.inputs
        samples = torch.tensor([len(z)], dtype=torch.int32)
        upload = {"total": z.sum(dim=0), "squares": z.square().sum().reshape(1), "samples": samples}
        return Message(upload), state


class FedKLDAServer(FedLDAServer):
    """FedLDA's, once the bandwidth is known: b^2 = 2 (sum |z|^2 / N - |mean z|^2), the mean squared distance.

    Attributes:
        bandwidth: b; 1 before the first task with samples has given it.
        requested: the tasks that begin with the stage `bandwidth`: the first, and others until anyone has answered. A
            task stays among them, so that the rounds of earlier tasks do not change.
    """

    method: FedKLDA
    state: ClassVar[Sequence[str]] = ("bandwidth", "_known", "requested")

    def __init__(self, method: FedKLDA, context: Context) -> None:
        super().__init__(method, context)
        self.bandwidth, self.requested = 1.0, {0}
        #: sum z, sum |z|^2 and N of the first exchange.
        self._sums: tuple[torch.Tensor, float, int] = self.zeros(context.inputs), 0.0, 0
        self._known = method.bandwidth != AUTO
        self._use(1.0 if isinstance(method.bandwidth, str) else method.bandwidth)

    def _use(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.random_features = self.method.features(self.context, projection_seed(self.context), bandwidth)
        self._cached = {}  # of test batches

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if not self._known and not int(self.n.sum()):
            self.requested.add(task.index)

    def stages(self, task: Task) -> list[str]:
        """What each round of the task is for."""
        first = self.method.bandwidth == AUTO and task.index in self.requested
        return [BANDWIDTH, "statistics"] if first else ["statistics"]

    def rounds(self, task: Task) -> int:
        return len(self.stages(task))

    def late_stage(self, task: Task, round_: int) -> str | None:
        return None if self.stages(task)[round_] == BANDWIDTH else super().late_stage(task, round_)

    def broadcast(self, task: Task, round_: int) -> Message:
        """Nothing in the stage that asks for the bandwidth; then FedLDA's, with the bandwidth or (whole) the phases."""
        if self.stages(task)[round_] == BANDWIDTH:
            return Message({}, stage=BANDWIDTH)
        message = super().broadcast(task, round_)
        phases = self.random_features.phases
        if "projection" in message and phases is not None:
            return message.with_tensors({**message, "phases": phases.to(torch.float64)})
        return message.with_tensors({**message, "bandwidth": torch.tensor(self.bandwidth, dtype=torch.float64)})

    def objection(self, upload: Message) -> str:
        if upload.stage != BANDWIDTH:
            return super().objection(upload)
        problem = sums_trouble(
            upload["total"].unsqueeze(1), float(upload["squares"]), upload["samples"], 1e-2, "squares"
        )
        return f"total {problem}" if problem else ""

    def absorb(self, client: int, upload: Message) -> None:
        if upload.stage != BANDWIDTH:
            super().absorb(client, upload)
            return
        total, squares, samples = self._sums
        self._sums = total + upload["total"], squares + float(upload["squares"]), samples + int(upload["samples"])

    def finish_round(self) -> None:
        total, squares, samples = self._sums
        if samples:
            self._sums = torch.zeros_like(total), 0.0, 0
            self._use(self._heuristic(total, squares, samples))
            self._known = True

    def finish_task(self) -> None:
        if not self._known and int(self.n.sum()):
            self.notices.tell(
                "requested",
                f"{self.method.name}: nobody had answered before the first statistics came, so there is a bandwidth"
                " of 1 (method.bandwidth=NUMBER sets it)",
            )
        super().finish_task()

    def _heuristic(self, total: torch.Tensor, squares: float, samples: int) -> float:
        """The bandwidth, or 1 where all samples are alike."""
        squared = mean_squared_distance(total, squares, samples)
        dtypes = self.context.dtype, self.context.wire.dtype
        rounding = torch.finfo(torch.float64).eps + relative_rounding(*dtypes)
        if squared * DOUBTFUL <= rounding * squares / samples:
            self.notices.tell(
                BANDWIDTH,
                f"{self.method.name}: the samples' distances are lost in rounding, so the bandwidth"
                f" {math.sqrt(squared) or 1.0:.3g} is arbitrary; method.bandwidth=NUMBER, or wire.dtype=float64",
            )
        return math.sqrt(squared) or 1.0

    def scores(self, H: torch.Tensor) -> torch.Tensor:
        """H W + b if there is one map, else the logarithm of their mean posterior."""
        maps = self.method.maps
        if maps == 1:
            return super().scores(H)
        assert self.bias is not None
        parts = zip(H.chunk(maps, dim=1), self.W.chunk(maps), self.bias, strict=True)
        posteriors = [torch.log_softmax(product(W.T, own.T).T + b, dim=1) for own, W, b in parts]
        return torch.logsumexp(torch.stack(posteriors), dim=0) - math.log(maps)

    def model(self) -> dict[str, torch.Tensor]:
        assert self.random_features.phases is not None
        return {**super().model(), "phases": self.random_features.phases}

    def report(self) -> dict[str, Any]:
        """FedLDA's, and `bandwidth`."""
        return {**super().report(), "bandwidth": self.bandwidth}

    def restored(self) -> None:
        self._use(self.bandwidth)
        super().restored()


@dataclass
class FedKLDA(FedLDA):
    name: ClassVar[str] = "fedklda"
    client_half = FedKLDAClient
    server_half = FedKLDAServer

    M: int = knob(2048, least=1)
    activation: ClassVar[str] = FOURIER  # type: ignore[misc]  # no knob here
    bounded: ClassVar[bool] = False  # the bandwidth comes from sum |z|^2, which nothing bounds
    bandwidth: float | str = knob(AUTO, above=0, choices=(AUTO,))
    ensemble: int = knob(1, least=1)

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        summed = {
            "total": real("d", combine=SUM, leaks=SUMS),
            "squares": real(1, least=0, combine=SUM),
            "samples": counts(1, combine=SUM),
        }
        return {**({BANDWIDTH: summed} if self.bandwidth == AUTO else {}), **super().uploads(context)}

    @property
    def largest_feature(self) -> float | None:
        return math.sqrt(2 / self.M)

    @property
    def maps(self) -> int:
        return self.ensemble

    def dimension(self, context: Context) -> int:
        """E M, the width of H."""
        return super().dimension(context) * self.maps

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        M, matrices = self.M, self.matrices() - 1 + self.maps
        require_memory(f"method.M={M}", 8 * context.inputs * M * self.maps, f"{self.maps} projections")
        require_memory(f"method.M={M}", 8 * matrices * M * M, f"{matrices} matrices of {M} x {M}")
