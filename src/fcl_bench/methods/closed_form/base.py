"""What the closed-form methods share: random features, class sums over the stream's columns, a linear classifier."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError, require_memory
from fcl_bench.linalg.gram import product
from fcl_bench.linalg.solve import Solution
from fcl_bench.methods.closed_form.algebra.random_features import ACTIVATIONS, RandomFeatures
from fcl_bench.protocol.context import ClientData, Context, Prediction, Task, TestBatch
from fcl_bench.protocol.fields import SQUARE
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Method, Server
from fcl_bench.randomness import derived_seed
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)

#: The most bytes of random features of test samples that a server keeps from task to task.
KEPT_FEATURES = 2**28
#: The most numbers in the largest matrix of a run for which one thread is enough (`make bench-sweep`).
_SMALL = 2**22


@dataclass
class ClosedFormMethod(Method):
    """A method that solves for a linear classifier on H = ReLU(Z P)."""

    client_half: ClassVar[type[ClosedFormClient]]
    server_half: ClassVar[type[ClosedFormServer]]

    M: int | None = knob(2048, least=1)
    activation: str = knob("relu", choices=ACTIVATIONS)

    def __post_init__(self) -> None:
        if self.M is None and self.activation == "none":
            raise UserError(
                "method.activation=none has no meaning with method.M=null, where nothing is projected",
                "a number for method.M, or without method.activation",
            )

    def dimension(self, context: Context) -> int:
        """M, the width of H."""
        return context.inputs if self.M is None else self.M

    @property
    def maps(self) -> int:
        """How many independent maps lie side by side in H."""
        return 1

    def features(self, context: Context, seed: int, bandwidth: float = 1.0) -> RandomFeatures:
        """The map of the knobs, drawn from a seed; the bandwidth is that of cosines."""
        outputs = None if self.M is None else self.dimension(context)
        like, activation, clip = (context.dtype, context.device), self.activation, clip_of(context)
        return RandomFeatures(seed, context.inputs, outputs, *like, activation, bandwidth, self.maps, clip)

    def sizes(self, context: Context) -> Mapping[str, int]:
        return {**super().sizes(context), "M": self.dimension(context)}

    @property
    def least_feature(self) -> float | None:
        """0 if no entry of H, and so none of its sums and products, is negative; None: they may be negative."""
        return 0 if self.M is not None and self.activation == "relu" else None

    def matrices(self) -> int:
        """How many M x M matrices a run holds at once."""
        return 4

    def small(self, context: Context, samples: int) -> bool:
        """Whether H of all training samples (N, M), and a Gram matrix (M, M) if a run holds any, are small."""
        M = self.dimension(context)
        return max(samples, M if self.matrices() else 0) * M <= _SMALL

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        M = self.dimension(context)
        if self.M is not None:
            require_memory(f"method.M={M}", 8 * context.inputs * M, "the projection")
        matrices = self.matrices()
        require_memory(f"method.M={M}", 8 * matrices * M * M, f"{matrices} matrices of {M} x {M}")

    def client(self, context: Context) -> Client:
        return self.client_half(self, context)

    def server(self, context: Context) -> Server:
        return self.server_half(self, context)


class ClosedFormClient(Client):
    """Maps a shard to random features. Its clients keep nothing; the projection is the same for all of them."""

    def __init__(self, method: ClosedFormMethod, context: Context) -> None:
        self.method = method
        self.context = context
        self.notices = Notices(log)
        self.dimension = method.dimension(context)
        #: The map of the last broadcast, and the seed and bandwidth that it was drawn by.
        self._features: tuple[tuple[int, float], RandomFeatures] | None = None

    def features(self, client_data: ClientData, broadcast: Message) -> torch.Tensor:
        """H (n, M) of the shard's labelled samples."""
        return self.random_features(broadcast).map(client_data.inputs)

    def blocks(self, client_data: ClientData, broadcast: Message) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batch by batch, H (b, M) and the position (b,) of each row's class among the task's classes.

        H is the largest thing that a client with many samples would hold.
        """
        features, which = self.random_features(broadcast), positions(client_data, broadcast["columns"])
        return zip(features.blocks(client_data.inputs), which.split(features.rows), strict=True)

    def random_features(self, broadcast: Message) -> RandomFeatures:
        """The map that the server asks for."""
        if "projection" in broadcast:
            like = self.context.device, self.context.dtype
            projection = broadcast["projection"].to(*like)
            phases = broadcast["phases"].to(*like) if "phases" in broadcast else None
            clip = clip_of(self.context)
            return RandomFeatures.given(projection, self.method.activation, phases, self.method.maps, clip)
        drawn_by = int(broadcast["seed"]), float(broadcast.get("bandwidth", 1.0))
        if self._features is None or self._features[0] != drawn_by:
            self._features = drawn_by, self.method.features(self.context, *drawn_by)
        return self._features[1]


def clip_of(context: Context) -> float | None:
    """The largest allowed length of h; None: no limit. Test samples are clipped as training samples are."""
    return None if context.release is None else context.release.clip


def projection_seed(context: Context) -> int:
    """What the server broadcasts in place of the projection."""
    return derived_seed(context.seed, "projection")


def positions(client_data: ClientData, columns: torch.Tensor) -> torch.Tensor:
    """(n,) the position of each of the shard's labels in `columns` (ascending), which has all of them."""
    return torch.searchsorted(columns.to(client_data.labels.device, torch.int64), client_data.labels)


def counted(client_data: ClientData, columns: torch.Tensor) -> torch.Tensor:
    """n (c,) int32: how many of the shard's samples are of each of `columns`."""
    return torch.bincount(positions(client_data, columns), minlength=len(columns)).to(torch.int32)


def one_hot(client_data: ClientData, columns: torch.Tensor) -> torch.Tensor:
    """Y (n, c), one row per label of the shard, with a 1 at its position in `columns`."""
    return (client_data.labels.unsqueeze(1) == columns.to(client_data.labels.device)).to(client_data.inputs.dtype)


class ClosedFormServer(Server):
    """Keeps B (M, C), one column per class seen, and the classifier W; a subclass keeps the second-order part.

    Attributes:
        by_class: names of the tensors whose last side is the classes seen; a task widens them by zeros.
        absorbs_late: whether `absorb` is the same sum for an upload of an earlier task, in that task's columns.
        B: (M, C) label-feature statistic, exact sums over clients and tasks.
        W: (M, C) solution after the last `finish_task`.
        bias: (C,) what is added to the scores H W; None: nothing.
        columns: (c_t,) of the task's classes.
    """

    state: ClassVar[Sequence[str]] = ("B",)
    by_class: ClassVar[Sequence[str]] = ("B",)
    absorbs_late: ClassVar[bool] = False

    def __init__(self, method: ClosedFormMethod, context: Context) -> None:
        self.method = method
        self.context = context
        self.notices = Notices(log)
        self.dimension = method.dimension(context)
        self.B = self.zeros(self.dimension, 0)
        self.W = self.B
        self.bias: torch.Tensor | None = None
        self._place(())
        self.random_features = method.features(context, projection_seed(context))
        #: H of test batches that come back after every task, by their number.
        self._cached: dict[int, torch.Tensor] = {}
        self._condition: float | None = None
        self._trouble = ""

    def zeros(self, *shape: int) -> torch.Tensor:
        """Zeros in the statistics' dtype on the device."""
        return torch.zeros(*shape, dtype=self.context.dtype, device=self.context.device)

    def _place(self, columns: Sequence[int]) -> None:
        self.columns = torch.tensor(columns, dtype=torch.int64, device=self.context.device)
        together = bool(columns) and columns[-1] - columns[0] + 1 == len(columns)
        # Consecutive columns are taken as a view, which is faster: thousands of clients add to it.
        self._where = slice(columns[0], columns[-1] + 1) if together else self.columns

    def start_task(self, task: Task) -> None:
        self._place(task.columns)
        for name in self.by_class:
            seen = getattr(self, name)
            setattr(self, name, torch.nn.functional.pad(seen, (0, task.columns_seen - seen.shape[-1])))

    def broadcast(self, task: Task, round_: int) -> Message:
        """The projection, as its seed (8 bytes) or itself, and the columns of the task's classes."""
        columns = torch.tensor(task.columns, dtype=torch.int32)
        projection = self.random_features.projection
        if self.context.wire.projection == "matrix" and projection is not None:
            return Message({"projection": projection.to(torch.float64), "columns": columns})
        return Message({"seed": torch.tensor(projection_seed(self.context)), "columns": columns})

    def late_stage(self, task: Task, round_: int) -> str | None:
        return "statistics" if self.absorbs_late else None

    def absorb_late(self, client: int, upload: Message, task: Task) -> None:
        """`absorb` in the columns of an earlier task."""
        with self.in_columns_of(task):
            self.absorb(client, upload)

    @contextmanager
    def in_columns_of(self, task: Task) -> Iterator[None]:
        """Within this block, `self.columns` are those of an earlier task."""
        now = self.columns, self._where
        self._place(task.columns)
        try:
            yield
        finally:
            self.columns, self._where = now

    def add_class_sums(self, sums: torch.Tensor) -> None:
        """B += sums (M, c) in the columns of the task's classes."""
        self.B[:, self._where] += sums

    def finish_task(self) -> None:
        self.solve()

    def solve(self) -> None:
        """Bring the classifier up to date."""
        solution = self.solution()
        self.W, self._condition, self._trouble = solution
        self.bias = self.intercept()
        if solution.trouble:
            # The log has the first of each kind ("the system is singular to rounding: ..."), the run record the last.
            kind, _, _ = solution.trouble.partition(":")
            self.notices.tell(kind, f"{self.method.name}, {self.B.shape[1]} classes seen: {solution.trouble}")

    def denoised(self, S: torch.Tensor, uploads: int) -> torch.Tensor:
        """S (M, M), made positive definite again where its noise has left it indefinite.

        Eigenvalues below zero are noise and become zero. Then all are raised by the largest eigenvalue of the noise
        alone, so that directions which hold little else count little. Without noise, S itself.

        Args:
            S: a sum of Gram matrices, minus parts that have no noise.
            uploads: how many clients' noise is in it.
        """
        release = self.context.release
        if release is None or not release.of(SQUARE):
            return S
        values, V = torch.linalg.eigh(S.to(torch.float64))
        nearest = (V * values.clamp_min(0)) @ V.T
        nearest.diagonal().add_(release.ridge * release.edge(len(S), uploads))
        return nearest

    @abstractmethod
    def solution(self) -> Solution:
        """The classifier from the statistics so far."""

    def intercept(self) -> torch.Tensor | None:
        """`bias` for the W at hand."""
        return None

    def classifier(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """W (M, C) and the bias (C,), if any, of the scores H W + bias."""
        return self.W, self.bias

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.scores(H) for H in self.random_features.blocks(inputs)])

    def classify(self, batch: TestBatch) -> Prediction:
        """Scores. While `random_features` stay, H of test batches that come back is stored as far as there is room."""
        H = None if batch.number is None else self._cached.get(batch.number)
        if H is None and len(batch.inputs) > self.random_features.rows:
            return Prediction(self.predict(batch.inputs))  # H is so wide that it is better made by blocks
        if H is None:
            H = self.random_features.map(batch.inputs)
            cached = sum(other.nbytes for other in self._cached.values())
            if batch.number is not None and cached + H.nbytes <= KEPT_FEATURES:
                self._cached[batch.number] = H
        return Prediction(self.scores(H))

    def scores(self, H: torch.Tensor) -> torch.Tensor:
        """H W + bias (n, C), the classes of a sample together in memory."""
        W, bias = self.classifier()
        scores = product(W.T, H.T).T
        return scores if bias is None else scores.add_(bias)

    def model(self) -> dict[str, torch.Tensor]:
        W, bias = self.classifier()
        features = self.random_features
        clip = None if features.clip is None else torch.tensor(features.clip, dtype=torch.float64)
        parts = {"W": W, "bias": bias, "projection": features.projection, "clip": clip}
        return {name: part for name, part in parts.items() if part is not None}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        self.W, self.bias = model["W"], model.get("bias")
        if "projection" in model:
            self.random_features.projection, self.random_features.phases = model["projection"], model.get("phases")
        if "clip" in model:  # of a run with noise, which this problem does not have
            self.random_features.clip = float(model["clip"])

    def report(self) -> dict[str, Any]:
        """`condition` of the last system solved, largest over smallest eigenvalue, and its `trouble`, null for none."""
        return {"condition": self._condition, "trouble": self._trouble or None}

    def restored(self) -> None:
        self.solve()
