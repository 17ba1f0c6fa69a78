"""The one interface: a method is a client half and a server half with one message type between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fcl_bench.protocol.message import Message, WireFormat
from fcl_bench.protocol.task import Task

if TYPE_CHECKING:
    from fcl_bench.backbones.trainable import Trainable


@dataclass(frozen=True)
class Problem:
    """What both halves know before the stream starts.

    Attributes:
        inputs: d, the number of features of a sample.
        seed: the run's seed, for generators derived from it.
        dtype: in which statistics are accumulated and solved.
        device: where they are.
        wire: how messages travel.
        network: what a method that trains the backbone starts from; None for the methods that take its features.
    """

    inputs: int
    seed: int
    dtype: torch.dtype
    device: torch.device
    wire: WireFormat
    network: Trainable | None = None


@dataclass(frozen=True)
class Shard:
    """One client's samples of one task.

    Attributes:
        client: k, from 0.
        task: t, from 0.
        inputs: the labelled samples on the device: features (n, d) in the statistics' dtype, or, for methods that
            train the network, images (n, 3, h, w) in uint8.
        labels: (n,) int64, their classes as columns of the label matrix.
        unlabelled: (m, ...) like `inputs`, the samples without a label (none at `label_rate` 1).
    """

    client: int
    task: int
    inputs: torch.Tensor
    labels: torch.Tensor
    unlabelled: torch.Tensor

    def with_pseudo_labels(self, labels: torch.Tensor) -> Shard:
        """The shard in which the unlabelled samples whose entry in `labels` (m,) is not -1 have that label."""
        accepted = labels >= 0
        return Shard(
            self.client,
            self.task,
            torch.cat([self.inputs, self.unlabelled[accepted]]),
            torch.cat([self.labels, labels[accepted]]),
            self.unlabelled[~accepted],
        )


@dataclass(frozen=True)
class Prediction:
    """What the server says of n samples.

    Attributes:
        scores: (n, C_t) over the classes seen so far.
        tasks: (n,) int64, the task whose classes alone are to compete; None: all compete.
        heads: per task, (n, c) scores of the task's classes, ascending, by a head of its own; None: those in `scores`.
    """

    scores: torch.Tensor
    tasks: torch.Tensor | None = None
    heads: tuple[torch.Tensor, ...] | None = None


class Client(ABC):
    """The client half. It sees its own shard and what the server broadcast, nothing else."""

    def pseudo_labels(self, shard: Shard) -> torch.Tensor | None:
        """Labels (m,) that the client gives its unlabelled samples, -1 for none; None: it leaves them all alone.

        The engine asks once per round, times it as the client's work, and counts how many labels are right.
        """
        return None

    @abstractmethod
    def update(self, shard: Shard, broadcast: Message) -> Message:
        """The upload of this client for this round."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What clients keep from one task to the next, all of them together, by name."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Take over what `state_dict` returned."""


class Server(ABC):
    """The server half. It sees uploads, nothing else, and keeps none of them.

    The engine calls, per task: `start_task`; then `rounds` times `participants`, `broadcast`, `absorb` for each of them
    as its upload arrives, and `finish_round`; then `finish_task`. `classify` is valid after each `finish_task`.

    Attributes:
        stage: under which the ledger counts the exchanges of the round at hand.
        pure_batches: None: test samples are classified one by one, whatever comes beside them. A number: in batches of
            so many that are known to be of one task, which tells the method more than a task-agnostic test does, and is
            said beside the results.
    """

    stage: str = "statistics"
    pure_batches: int | None = None

    @abstractmethod
    def start_task(self, task: Task) -> None:
        """Make room for the task's classes."""

    def rounds(self, task: Task) -> int:
        """Rounds of exchange in this task; 1 for the analytic methods."""
        return 1

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        """Which of the clients that hold labelled samples of the task take part in a round, in order of their turns."""
        return available

    @abstractmethod
    def broadcast(self, task: Task, round_: int) -> Message:
        """What every client receives at the start of a round."""

    @abstractmethod
    def absorb(self, client_id: int, message: Message) -> None:
        """Take in one upload, already in the statistics' dtype on the device."""

    def finish_round(self) -> None:  # noqa: B027
        """All uploads of the round are in."""

    @abstractmethod
    def finish_task(self) -> None:
        """All rounds of the task are over; bring the classifier up to date."""

    @abstractmethod
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Class scores (n, C_t) over the classes seen so far, of `inputs` (n, d)."""

    def classify(self, inputs: torch.Tensor, one_task: bool = False) -> Prediction:
        """Scores of `inputs` and, from a method that tells tasks apart, the task of each.

        Args:
            inputs: (n, ...) test samples.
            one_task: whether they are known to be of one task.
        """
        return Prediction(self.predict(inputs))

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """What scoring `inputs` begins with, if nothing that the server learns can change it; None: nothing such.

        The engine keeps it for as many samples as it has room for, and asks `classify_prepared` of them, `classify`
        of the others only: whoever overrides one of the three has to have the others agree.
        """
        return None

    def classify_prepared(self, prepared: torch.Tensor) -> Prediction:
        """As `classify`, of what `prepare` returned."""
        raise NotImplementedError(f"{type(self).__name__}.prepare has nothing to go on from")

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Features (n, d) under the backbone as it is now; a frozen one's are the inputs."""
        return inputs

    @abstractmethod
    def model(self) -> dict[str, torch.Tensor]:
        """What prediction needs, as tensors: the classifier `W` (M, C) and whatever comes before it."""

    def report(self) -> dict[str, Any]:
        """What this method adds to the run record, as JSON (run.json: `report`)."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything a resumed run needs after `finish_task`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""


class Audit(ABC):
    """Compares a method's approximation with the exact solution. It sees everything, so it is no part of the method.

    The engine calls `observe` for every client's labelled samples during the first round of a task, `look` after each
    round, and `report` after each task.
    """

    @abstractmethod
    def observe(self, task: Task, shard: Shard) -> None:
        """Take in what a client learnt from (pseudo-labelled samples included)."""

    def look(self, task: Task, round_: int, server: Server) -> None:  # noqa: B027
        """The server has finished a round."""

    @abstractmethod
    def report(self, task: Task, server: Server, tests: Iterable[torch.Tensor]) -> dict[str, float | None]:
        """Bound and truth after a task, a row of bounds.csv; None for what is not finite.

        Args:
            task: the task just finished.
            server: its server half.
            tests: batches (n, d) of the test samples of all tasks so far.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything a resumed run needs after `report`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""


class Method(ABC):
    """What `method=...` names: a dataclass of the method's knobs that makes both halves.

    Attributes:
        name: what tables call it.
        revision: to be raised when a change to the method changes its numbers; part of the run id, so that runs of the
            old code are not taken for runs of the new.
        trains_network: whether it trains the backbone itself, on images, rather than take a frozen one's features.
        resumes_within_tasks: whether its server's state is whole after every round, not only after a task.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1
    trains_network: ClassVar[bool] = False
    resumes_within_tasks: ClassVar[bool] = False

    def check(self, problem: Problem, classes_per_task: list[int]) -> None:  # noqa: B027
        """Raise a `UserError` for knobs that this problem rules out, before any work is done."""

    @abstractmethod
    def client(self, problem: Problem) -> Client:
        """The client half; one object serves all clients, and keeps apart what any of them keeps between tasks."""

    @abstractmethod
    def server(self, problem: Problem) -> Server:
        """The server half, before its first task."""

    def audit(self, problem: Problem) -> Audit | None:
        """What compares this method with the exact solution, if its knobs ask for that."""
        return None

    def accounting(self, problem: Problem, classes_per_task: list[int]) -> dict[str, float]:
        """The upload under the papers' own conventions: `fedran_mib`, `stsa_mib` (see `federation.accounting`)."""
        return {}
