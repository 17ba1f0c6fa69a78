"""A client's turn in a round: what it was, and what of it reaches the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from fcl_bench.engine.ledger import Stopwatch
from fcl_bench.engine.single_sample_leakage import NOTHING, Grouped, Leakage
from fcl_bench.protocol.fields import SampleCounts, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.task import Task

#: What became of a turn, `Turn.fate`: its upload arrives now, is in a sum that the server can read, was refused,
#: arrives in a later round, or never.
ARRIVES, SUMMED, DROPPED, LATE, LOST = "arrives", "summed", "dropped", "late", "lost"


@dataclass(frozen=True)
class Held:
    """How many samples clients hold in a task.

    Attributes:
        samples, labelled: (K,) of the task, and how many of them have a label.
        announced: (K,) of all tasks so far.
    """

    samples: np.ndarray
    labelled: np.ndarray
    announced: np.ndarray

    def counts(self, clients: list[int]) -> SampleCounts:
        """How many samples these clients have together."""
        return SampleCounts(int(self.samples[clients].sum()), int(self.announced[clients].sum()))


@dataclass
class Round:
    """A round under way.

    Attributes:
        task, number: which; numbers are from 0 in each task.
        present: the clients that are asked, in order of their turns.
        broadcast: what they receive.
        schema: the fields that their uploads have to have.
        held: how many samples clients hold.
        watch: of the server.
        columns: the round's rows of uploads.csv, (K,) each.
    """

    task: Task
    number: int
    present: list[int]
    broadcast: Message
    schema: Schema
    held: Held
    watch: Stopwatch
    columns: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        clients = len(self.held.samples)
        counted = ("accepted", "right", "up_bytes", "down_bytes", "one_sample_sums", "one_sample_moments")
        zeros = {name: np.zeros(clients, dtype=np.int64) for name in (*counted, DROPPED, LOST, LATE)}
        known = {"client": np.arange(clients), "samples": self.held.samples, "labelled": self.held.labelled}
        self.columns = {**zeros, **known, "client_seconds": np.zeros(clients)}


@dataclass(frozen=True)
class Arrival:
    """A message that arrives at the server, or at a node of a tree.

    Attributes:
        client: who sent it; the first client whose upload is in it; `EVERYONE` for the sum of a round.
        upload: as it travelled.
        announced: how many samples the clients in it have; None: they have not said.
        clients: how many these are.
        sender: the sender's name in errors; "": the client's.
        exact: whether it is a sum that did not travel in the wire's floating-point type.
        rounding: the largest absolute error of its entries, besides that of the wire's type.
    """

    client: int
    upload: Message
    announced: SampleCounts | None = None
    clients: int = 1
    sender: str = ""
    exact: bool = False
    rounding: float = 0.0


@dataclass
class Turn:
    """What the steps of an exchange know of one answer; each of them may change it.

    Attributes:
        client: whose turn it was.
        reply: what it cost; None: there was none, or it was counted in an earlier round.
        fate: what became of it.
        reason: why it is LOST.
        arrival: what arrives at the server in this round; None: nothing.
        earlier: an upload of an earlier round that arrives now.
        upload: what the server absorbs: the arrival, decoded and validated.
        source: whose upload that is; see `Arrival.client`.
    """

    client: int
    reply: Reply | None = None
    fate: str = ARRIVES
    reason: str = ""
    arrival: Arrival | None = None
    earlier: Message | None = None
    upload: Message | None = None
    source: int = -1


class Answer(Protocol):
    """What a transport gives for a client that a round asks."""

    def turn(self, round_: Round) -> Turn:
        """The turn that it answers."""


@dataclass(frozen=True)
class Reply:
    """A client that has answered.

    Attributes:
        client: whose turn it was.
        upload: as it travels.
        seconds: the client's own, from its data to the upload on the wire.
        guesses: (m,) the labels that it gave its unlabelled samples, -1 for none; None: it did not use them. They are
            not part of the upload, and only a transport that sees everything has them.
        stored: bytes that the client retains until its next turn, by kind (see `State`).
        samples_kept: how many raw samples the client retains (see `SAMPLE_KINDS`).
        revealed: what the upload reveals about single samples, as the method declares. Their indices are those of the
            data set.
        accepted: how many unlabelled samples it gave a label.
        right: how many of these labels are true; None if the true labels are unknown.
        grouped: from which `revealed` follows for a sum of uploads; None if uploads are not added up.
        together: how many clients trained side by side with this one, itself included.
        alone: why none did, although it was asked for (`parallel_clients`); "": not asked for, or done.
    """

    client: int
    upload: Message
    seconds: float
    guesses: torch.Tensor | None
    stored: dict[str, int]
    samples_kept: int
    revealed: Leakage = NOTHING
    accepted: int = 0
    right: int | None = 0
    grouped: Grouped | None = None
    together: int = 1
    alone: str = ""

    def turn(self, round_: Round) -> Turn:
        """The upload is of this round or, without any cost, of an earlier one."""
        if (self.upload.task, self.upload.round) != (round_.task.index, round_.number):
            return Turn(self.client, earlier=self.upload)
        announced = round_.held.counts([self.client])
        return Turn(self.client, self, arrival=Arrival(self.client, self.upload, announced))


@dataclass(frozen=True)
class Lost:
    """A client that gave no reply, and why."""

    client: int
    reason: str

    def turn(self, round_: Round) -> Turn:
        """A turn without a reply."""
        return Turn(self.client, fate=LOST, reason=self.reason)


@dataclass(frozen=True)
class Late:
    """A client that has had its turn, and whose upload arrives in a later round; the reply says what it cost."""

    reply: Reply

    def turn(self, round_: Round) -> Turn:
        """A turn that cost something and brings nothing yet."""
        return Turn(self.reply.client, self.reply, LATE)
