"""A round's exchange: every answer passes the steps, each of which knows one thing, before the server absorbs it.

What stands between the transport and the server is composed in `engine.loop`: the ledger, what options add (sums under
masks, a tree), clients whose upload is missing, validation, audits. Noise and the wire's forms are middleware of the
codec.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from fcl_bench.engine.ledger import NOBODY_KNOWS
from fcl_bench.errors import UserError, kind_of
from fcl_bench.protocol.compute import TALLY
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.fields import Field, SampleCounts, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server

if TYPE_CHECKING:
    from fcl_bench.engine.loop import FederationState
    from fcl_bench.engine.single_sample_leakage import Grouped, Leakage
    from fcl_bench.engine.transport import Transport

#: What became of a turn, `Turn.fate`: its upload arrives now, is in a sum that the server can read, was refused,
#: arrives in a later round, or never.
ARRIVES, SUMMED, DROPPED, LATE, LOST = "arrives", "summed", "dropped", "late", "lost"


class Stopwatch:
    """Wall-clock seconds of a block, and what it computed.

    On CUDA they lie between two events in the device's queue, so that work which was queued before the block does not
    count, and the host waits once for each block: at its end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds, self.counts = device, 0.0, Counter[str]()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the block's seconds and counts."""
        begun, before = self._mark(), TALLY.counts.copy()
        try:
            yield
        finally:
            ended = self._mark()
            self.counts = self.counts + (TALLY.counts - before)
            if isinstance(begun, float):
                self.seconds += ended - begun
            else:
                ended.synchronize()
                self.seconds += begun.elapsed_time(ended) / 1000

    def _mark(self) -> Any:
        """The time; on CUDA an event that happens when the device has done what it was asked so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


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
        announced: how many samples the clients in it have; None: they have not said.
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
        reply: what it cost; None: there was none, or it was counted in an earlier round.
        arrival: what arrives at the server in this round; None: nothing.
        earlier: an upload of an earlier round that arrives now.
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
        seconds: the client's own, from its data to the upload on the wire.
        guesses: (m,) the labels that it gave its unlabelled samples, -1 for none; None: it did not use them. They are
            not part of the upload, and only a transport that sees everything has them.
        stored: bytes that the client retains until its next turn, by kind (see `State`).
        samples_kept: how many raw samples the client retains (see `SAMPLE_KINDS`).
        revealed: what the upload reveals about single samples, as the method declares, with their indices in the data
            set; None: nothing that leaks is declared.
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
    revealed: Leakage | None = None
    accepted: int = 0
    right: int | None = 0
    grouped: Grouped | None = None
    together: int = 1
    alone: str = ""
    counts: Counter[str] = field(default_factory=Counter)

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


#: Header and rows.
Table = tuple[list[str], Iterable[Sequence[Any]]]


class Step(ABC):
    """One thing that happens to every turn of a round."""

    @abstractmethod
    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        """The turns of a round, on their way from the transport to the server.

        A generator: what stands before its `yield` happens before the server absorbs what the turn brings; what follows
        happens after that, and before the next client's turn. It then forgets the turn, for the next one's sake.
        """

    def report(self) -> Mapping[str, Any]:
        """Its entries in run.json's `transport`."""
        return {}

    def tables(self) -> Mapping[str, Table]:
        """Its tables in the run folder, by file name."""
        return {}

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a resumed run needs, as JSON and tensors that only grow."""
        return {}, {}

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Take over what `save` returned."""


def largest_reply(round_: Round) -> int:
    """The most bytes of a reply that the server may absorb: no sender chooses more rows or columns than it has samples,
    or than the longest side that is known."""
    fields, samples = round_.schema.values(), int(round_.held.announced.max(initial=0))
    known = [side for own in fields for side in (*own.shape, own.widest) if isinstance(side, int)]
    longest = max([samples, *known])
    numbers = sum(math.prod(side if isinstance(side, int) else longest for side in own.shape) for own in fields)
    return 2**20 + 16 * numbers + 1024 * len(fields) + 64 * samples


class Exchange:
    """The exchange of rounds over a transport."""

    def __init__(self, transport: Transport, steps: Sequence[Step]) -> None:
        self._transport, self.steps = transport, tuple(steps)

    def uploads(self, round_: Round) -> Iterator[tuple[int, Message]]:
        """What the server absorbs in a round, and whose it is (see `Arrival.client`).

        The next client's turn begins when this one's upload is absorbed, and no upload is retained.
        """
        self._transport.most = largest_reply(round_)
        return self.passed(round_, self._transport.exchange(round_.present, round_.broadcast))

    def passed(self, round_: Round, answers: Iterator[Answer]) -> Iterator[tuple[int, Message]]:
        """The same of answers to the round's broadcast that have come."""
        # A generator expression would retain an answer while the next one is made.
        turns: Iterator[Turn] = map(lambda answer: answer.turn(round_), answers)  # noqa: C417
        for step in self.steps:
            turns = step.passed(round_, turns)
        for turn in turns:
            if turn.upload is not None:
                yield turn.source, turn.upload
            del turn

    def report(self) -> dict[str, Any]:
        return {name: value for step in self.steps for name, value in step.report().items()}

    def tables(self) -> dict[str, Table]:
        return {name: table for step in self.steps for name, table in step.tables().items()}

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a resumed run needs of all steps."""
        saved, tensors = zip(*(step.save() for step in self.steps), strict=True)
        return dict(ChainMap(*saved)), dict(ChainMap(*tensors))

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        for step in self.steps:
            step.restore(saved, tensors)


class Accounting(Step):
    """Bytes, seconds, what clients retain and reveal: the columns of the round."""

    def __init__(self, state: FederationState) -> None:
        self._state = state

    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        for turn in turns:
            if turn.reply is not None:
                self._cost(round_, turn.client, turn.reply)
                if turn.fate != SUMMED and turn.reply.revealed is not None:  # a sum has what its uploads reveal
                    self.reveal(round_, turn.client, turn.reply.revealed)
            yield turn
            if turn.reply is not None and turn.fate != DROPPED:
                self._keeps(round_, turn.client, turn.reply)
            del turn

    def _cost(self, round_: Round, client: int, reply: Reply) -> None:
        """Count bytes and seconds of a turn."""
        columns, batched = round_.columns, self._state.batched_turns
        columns["up_bytes"][client] = reply.upload.nbytes
        columns["down_bytes"][client] = self._state.ledger.cached.send(client, round_.broadcast)
        columns["client_seconds"][client] = reply.seconds
        self._state.client_counts = Counter(self._state.client_counts) + reply.counts
        batched["turns_batched" if reply.together > 1 else "turns_single"] += 1
        if reply.alone and reply.alone not in batched["single_because"]:
            batched["single_because"].append(reply.alone)

    def reveal(self, round_: Round, client: int, alone: Leakage) -> None:
        """Count what an upload, or the sum that it is in, reveals of the samples that a client learnt from."""
        round_.columns["one_sample_sums"][client] = alone.sums
        round_.columns["one_sample_moments"][client] = alone.moments
        self._state.ledger.revealed.add(alone.samples)

    def _keeps(self, round_: Round, client: int, reply: Reply) -> None:
        """Count what a client keeps, and the labels that it gave its samples."""
        state, stored = self._state, dict(reply.stored)
        # What a broadcast has and this turn did not cost: the client keeps it since an earlier one.
        if received := round_.broadcast.nbytes - int(round_.columns["down_bytes"][client]):
            stored["received"] = received
        for kind, size in stored.items():
            state.client_storage_bytes[kind] = max(state.client_storage_bytes.get(kind, 0), size)
        state.client_storage_max_bytes = max(state.client_storage_max_bytes, sum(stored.values()))
        state.client_samples_kept = max(state.client_samples_kept, reply.samples_kept)
        round_.columns["accepted"][client] = reply.accepted
        round_.columns["right"][client] = NOBODY_KNOWS if reply.right is None else reply.right


def schema_of(server: Server, task: Task, stage: str) -> Schema:
    """What the server expects of the round's uploads. Raises a `UserError` if that is not a `Field` for each name."""
    where = f"{type(server).__name__}.schema"
    try:
        expected = server.schema(task, stage)
    except KeyError as error:
        raise UserError(f"{where}: the method declares no stage {stage!r}", "`uploads` with all stages") from error
    remedy = 'a mapping of names to what each is, such as {"G": gram_matrix(M)}'
    if not isinstance(expected, Mapping):
        raise UserError(f"{where} returned {kind_of(expected)}", remedy)
    for name, wanted in expected.items():
        if not isinstance(wanted, Field):
            raise UserError(f"{where}: {name} is {kind_of(wanted)}", remedy)
    return expected
