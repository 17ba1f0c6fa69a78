"""The rows of the table: the inputs of every side. All follow from a seed, so all processes have the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.images.batches import Standardise, epoch_batches
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.methods.closed_form.algebra.random_features import RandomFeatures
from fcl_bench.methods.closed_form.base import projection_seed
from fcl_bench.methods.gradient.client import head_seed
from fcl_bench.protocol.context import Context, WireFormat
from fcl_bench.randomness import derived_seed, generator
from fcl_bench.training.network import Network

CPU = torch.device("cpu")
SEED = 0


@dataclass(frozen=True)
class Row:
    """Clients with equally many samples of one task.

    Attributes:
        clients, samples, classes: K, n of each client, C.
        peers: whose public code does the same.
        tolerance: by how much results may differ, as a share of their length.
    """

    peers: ClassVar[tuple[str, ...]]
    tolerance: ClassVar[float]

    clients: int
    samples: int
    classes: int = 10

    @cached_property
    def labels(self) -> torch.Tensor:
        """(K n,) of all clients, one after the other."""
        return torch.arange(self.clients * self.samples) % self.classes

    @cached_property
    def shards(self) -> list[np.ndarray]:
        """(n,) for each client: which of all samples are its own, one client's after the other's."""
        return np.split(np.arange(self.clients * self.samples), self.clients)

    def parts(self, inputs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each client's inputs (n, ...) of those of all (K n, ...), and labels (n,); not copied."""
        return list(zip(inputs.split(self.samples), self.labels.split(self.samples), strict=True))

    def orders(self, client: int, round_: int) -> list[list[int]]:
        """The order in which a client uses its own samples (0 to n - 1), for each epoch of a round."""
        return [list(range(self.samples))]


@dataclass(frozen=True)
class Averaging(Row):
    """FedAvg of the small convolutional network (`backbone=tiny`) on random images, by plain SGD.

    Attributes:
        batch: samples per step; it divides n, since PFLlib drops what is left over.
        rounds, epochs, lr: of the training.
        width, side: of the network's first stage, and of the images.
    """

    peers: ClassVar[tuple[str, ...]] = ("plain", "pfllib", "fl_bench", "fed_mammoth")
    tolerance: ClassVar[float] = 1e-4

    batch: int = 32
    rounds: int = 2
    epochs: int = 1
    lr: float = 0.01
    width: int = 32
    side: int = 32

    def __post_init__(self) -> None:
        assert self.samples % self.batch == 0

    def __str__(self) -> str:
        step = (
            f"batches of {self.batch}, {self.rounds} round{'s' * (self.rounds > 1)}, tiny network of width {self.width}"
        )
        return f"FedAvg, K {self.clients} x {self.samples} samples, {step}"

    @cached_property
    def pixels(self) -> torch.Tensor:
        """(K n, 3, side, side) uint8: what they show does not change how long they take."""
        shape = (self.clients * self.samples, 3, self.side, self.side)
        return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED))

    @cached_property
    def images(self) -> torch.Tensor:
        """The same as the network sees them, in float32: ours standardises batch by batch, the others get these."""
        return Standardise(self.side, self.start.mean, self.start.std)(self.pixels).contiguous()

    @cached_property
    def start(self) -> Trainable:
        """The body in its first weights."""
        blank = np.zeros((1, self.side, self.side, 3), dtype=np.uint8)
        split = image_split(np.zeros(1, dtype=np.int64), ArrayImages(blank))
        return Tiny(width=self.width, size=self.side).trainable(Dataset("random", split, split), SEED)

    @cached_property
    def context(self) -> Context:
        return Context(self.start.dimension, SEED, torch.float64, CPU, WireFormat(torch.float32), self.start)

    def model(self) -> torch.nn.Sequential:
        """A new one with the weights from which everyone starts: body and head."""
        network = Network(self.start)
        network.grow([self.classes], head_seed(self.context))
        return torch.nn.Sequential(network.body, network.heads[0])

    def batches(self, client: int, round_: int) -> Iterator[Iterator[torch.Tensor]]:
        """For each epoch of a client's round, its batches as our clients draw them: indices (b,) from 0 to n - 1."""
        seed = derived_seed(SEED, "training", 0, round_, client)
        rng = torch.Generator().manual_seed(seed)
        return (epoch_batches(self.samples, self.batch, rng) for _ in range(self.epochs))

    def orders(self, client: int, round_: int) -> list[list[int]]:
        return [torch.cat(list(epoch)).tolist() for epoch in self.batches(client, round_)]


@dataclass(frozen=True)
class Statistics(Row):
    """One task of a closed-form method on ready features (K n, d).

    Attributes:
        method: afl, stsa, stsa_e.
        inputs, M: d, and the number of random features (not of AFL).
        groups: K_D of STSA-E; it divides n, since the public code's last group takes what is left over.
        ridge: of the server (STSA), or of the clients (AFL).
    """

    tolerance: ClassVar[float] = 1e-3

    method: str = "stsa"
    inputs: int = 512
    M: int = 1024
    groups: int = 10
    ridge: float = 1e4

    def __post_init__(self) -> None:
        assert self.samples % self.groups == 0

    @property
    def peers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("afl",) if self.method == "afl" else ("stsa",)

    def __str__(self) -> str:
        size = "" if self.method == "afl" else f", M {self.M:,}"
        groups = f", K_D {self.groups}" if self.method == "stsa_e" else ""
        name = self.method.upper().replace("_", "-")
        return f"{name}, K {self.clients} x {self.samples} samples, d {self.inputs}{size}{groups}, C {self.classes}"

    @cached_property
    def features(self) -> torch.Tensor:
        """(K n, d) float32 around class means, with variances that fall off as a backbone's do (as 1 / i)."""
        rng = torch.Generator().manual_seed(SEED)
        means = torch.randn(self.classes, self.inputs, generator=rng)[self.labels]
        spread = torch.arange(1, self.inputs + 1).rsqrt()
        return (means + torch.randn(means.shape, generator=rng)) * spread

    @cached_property
    def context(self) -> Context:
        return Context(self.inputs, SEED, torch.float64, CPU, WireFormat(torch.float32))

    @cached_property
    def projection(self) -> torch.Tensor:
        """P (d, M) in float64, the one that our clients draw."""
        drawn = RandomFeatures(projection_seed(self.context), self.inputs, self.M, torch.float64, CPU).projection
        assert drawn is not None
        return drawn

    def groups_of(self, client: int) -> torch.Tensor:
        """(n,) a client's own samples, those of its first dummy client first, as ours deals them."""
        dealt = generator(SEED, "dummy clients", 0, client).permutation(self.samples) % self.groups
        return torch.from_numpy(np.argsort(dealt, kind="stable"))


#: By size: "full" is the table, "smoke" shows that everything runs.
ROWS: dict[str, dict[str, Row]] = {
    "full": {
        "large": Averaging(5, 640, batch=64, rounds=1),
        "k100": Averaging(100, 32, batch=32, rounds=1),
        "k500": Averaging(500, 20, batch=20, rounds=1),
        # A quarter of the network's width: the step is short, so that what a client's turn costs besides shows.
        "k100_narrow": Averaging(100, 32, batch=32, width=8),
        "k500_narrow": Averaging(500, 20, batch=20, rounds=1, width=8),
        "stsa": Statistics(20, 150, M=1024),
        "afl_k10": Statistics(10, 1000, classes=100, method="afl", ridge=1.0),
        "afl_k50": Statistics(50, 200, classes=100, method="afl", ridge=1.0),
        "stsa_e": Statistics(20, 150, M=1024, method="stsa_e"),
    },
    "smoke": {
        "large": Averaging(2, 8, batch=4, width=2, side=8),
        "k100": Averaging(6, 4, batch=4, width=2, side=8),
        "k500": Averaging(8, 2, batch=2, width=2, side=8),
        "k100_narrow": Averaging(6, 4, batch=4, width=2, side=8),
        "k500_narrow": Averaging(8, 2, batch=2, rounds=1, width=2, side=8),
        "stsa": Statistics(3, 20, inputs=8, M=24),
        "afl_k10": Statistics(2, 20, inputs=8, method="afl", ridge=1.0),
        "afl_k50": Statistics(5, 20, inputs=8, method="afl", ridge=1.0),
        # The public code takes no more groups than samples of a class.
        "stsa_e": Statistics(3, 40, classes=2, inputs=8, M=24, method="stsa_e"),
    },
}
