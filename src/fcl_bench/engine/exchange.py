"""A round's exchange: every answer passes the steps, each of which knows one thing, before the server absorbs it.

What stands between the transport and the server is composed here, once: the ledger, what options add (sums under masks,
a tree), clients whose upload is missing, validation, audits. Noise and the wire's forms are middleware of the codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.ledger import NOBODY_KNOWS
from fcl_bench.engine.single_sample_leakage import Leakage
from fcl_bench.engine.state import FederationState
from fcl_bench.engine.transport import Transport
from fcl_bench.engine.turn import ARRIVES, DROPPED, SUMMED, Arrival, Round, Turn
from fcl_bench.engine.validation import BadUpload, validate_upload
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import EVERYONE, Server
from fcl_bench.tracking.console import Notices

#: Header and rows.
Table = tuple[list[str], Iterable[Sequence[Any]]]


class Step:
    """One thing that happens to every turn of a round."""

    def begin(self, round_: Round) -> None:
        """Before the first turn."""

    def take(self, round_: Round, turn: Turn) -> None:
        """Before the server absorbs what the turn brings."""

    def absorbed(self, round_: Round, turn: Turn) -> None:
        """After that."""

    def finish(self, round_: Round) -> None:
        """After the last turn."""

    def report(self) -> Mapping[str, Any]:
        """Its entries in run.json's `transport`."""
        return {}

    def tables(self) -> Mapping[str, Table]:
        """Its tables in the run folder, by file name."""
        return {}

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a resumed run needs, as JSON and tensors that only grow."""
        return {}, {}

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `save` returned."""


class Exchange:
    """The exchange of rounds over a transport.

    Args:
        transport: reaches the clients.
        steps: in their order, from the transport to the server.
    """

    def __init__(self, transport: Transport, steps: Sequence[Step]) -> None:
        self._transport, self._steps = transport, tuple(steps)

    def uploads(self, round_: Round) -> Iterator[tuple[int, Message]]:
        """What the server absorbs in a round, and whose it is (see `Arrival.client`).

        The next client's turn begins when this one's upload is absorbed, and no upload is retained.
        """
        for step in self._steps:
            step.begin(round_)
        for answer in self._transport.exchange(round_.present, round_.broadcast):
            turn = answer.turn(round_)
            for step in self._steps:
                step.take(round_, turn)
            if turn.upload is not None:
                yield turn.source, turn.upload
            for step in self._steps:
                step.absorbed(round_, turn)
            del answer, turn
        for step in self._steps:
            step.finish(round_)

    def report(self) -> dict[str, Any]:
        """What the steps say in run.json's `transport`."""
        return {name: value for step in self._steps for name, value in step.report().items()}

    def tables(self) -> dict[str, Table]:
        """The steps' tables, by file name."""
        return {name: table for step in self._steps for name, table in step.tables().items()}

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a resumed run needs of all steps."""
        parts = [step.save() for step in self._steps]
        return (
            {name: value for saved, _ in parts for name, value in saved.items()},
            {name: value for _, tensors in parts for name, value in tensors.items()},
        )

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `save` returned."""
        for step in self._steps:
            step.restore(saved, tensors)


class Accounting(Step):
    """Bytes, seconds, what clients retain and reveal: the ledger's rows of the round."""

    def __init__(self, state: FederationState) -> None:
        self._state = state

    def take(self, round_: Round, turn: Turn) -> None:
        reply, columns = turn.reply, round_.columns
        if reply is None:
            return
        columns["up_bytes"][turn.client] = reply.upload.nbytes
        columns["down_bytes"][turn.client] = self._state.ledger.send(turn.client, round_.broadcast)
        columns["client_seconds"][turn.client] = reply.seconds
        self._state.note_turn(reply)
        if turn.fate != SUMMED:  # of these the sum reveals what is revealed
            self.reveal(round_, turn.client, reply.revealed)

    def reveal(self, round_: Round, client: int, alone: Leakage) -> None:
        """Count what an upload, or the sum that it is in, reveals of the samples that a client learnt from."""
        round_.columns["one_sample_sums"][client] = alone.sums
        round_.columns["one_sample_moments"][client] = alone.moments
        self._state.ledger.told.add(alone.samples)

    def absorbed(self, round_: Round, turn: Turn) -> None:
        reply = turn.reply
        if reply is None or turn.fate == DROPPED:
            return
        self._state.note_stored(reply)
        round_.columns["accepted"][turn.client] = reply.accepted
        round_.columns["right"][turn.client] = NOBODY_KNOWS if reply.right is None else reply.right

    def finish(self, round_: Round) -> None:
        self._state.ledger.add_round(round_.task.index, round_.number, round_.broadcast.stage, round_.columns)


class Validation(Step):
    """Only uploads as the server expects them are absorbed; others end the run, or are left out of the round.

    Args:
        middleware: the server side's middleware.
        server: declares what it expects.
        context: of the wire and the statistics.
        transport: is told of uploads that were left out.
        notices: informs the user.
        drops: whether a client's bad upload is left out.
    """

    def __init__(
        self,
        middleware: Middleware,
        server: Server,
        context: Context,
        transport: Transport,
        notices: Notices,
        drops: bool,
    ) -> None:
        self._middleware, self._server, self._context = middleware, server, context
        self._transport, self._notices, self._drops = transport, notices, drops

    def take(self, round_: Round, turn: Turn) -> None:
        if turn.arrival is not None:
            turn.source = turn.arrival.client
            with round_.watch.running():
                turn.upload = self.received(round_, turn)
            turn.arrival = None

    def received(self, round_: Round, turn: Turn) -> Message | None:
        """What a turn brings, decoded and validated; None: it was refused, and the client has its old state again.

        Raises:
            BadUpload: it is not as expected, and the run is set to end in this case, or several clients made it.
        """
        arrival = turn.arrival
        assert arrival is not None
        if arrival.sender or arrival.client == EVERYONE:
            return self.read(arrival, round_.schema)
        upload = self.unless_bad(arrival, round_.schema)
        if upload is None:
            self._transport.refused(turn.client)
            round_.columns[DROPPED][turn.client] = 1
            turn.fate = DROPPED
        return upload

    def read(self, arrival: Arrival, schema: Schema) -> Message:
        """The message that the receiver computes with. Raises `BadUpload` if it is not as expected."""
        return validate_upload(arrival, schema, self._middleware, self._server, self._context)

    def unless_bad(self, arrival: Arrival, schema: Schema) -> Message | None:
        """The same; None for a bad upload that is left out."""
        try:
            return self.read(arrival, schema)
        except BadUpload as bad:
            if not self._drops:
                raise
            self._notices.tell(f"client {arrival.client}", f"{bad}; it is left out of the round (on_bad_upload=drop)")
            return None


class Observation(Step):
    """Shows the audits what clients learn from, in a task's first round.

    Args:
        audits: those that look.
        transport: sees all clients' data.
    """

    def __init__(self, audits: Mapping[str, Audit], transport: Transport) -> None:
        self._audits, self._transport = audits, transport
        self._seen: set[int] = set()

    def begin(self, round_: Round) -> None:
        self._seen = set()

    def absorbed(self, round_: Round, turn: Turn) -> None:
        reply = turn.reply
        if (
            round_.number == 0
            and reply is not None
            and turn.fate in (ARRIVES, SUMMED)
            and round_.held.labelled[turn.client]
        ):
            self._seen.add(turn.client)
            self._observe(round_, turn.client, reply.guesses)

    def finish(self, round_: Round) -> None:
        if round_.number == 0:
            for client in sorted(set(np.flatnonzero(round_.held.labelled).tolist()) - self._seen):
                self._observe(round_, client)

    def _observe(self, round_: Round, client: int, guesses: torch.Tensor | None = None) -> None:
        data = self._transport.everything
        assert data is not None
        own = data.client_data(round_.task.index, client)
        for audit in self._audits.values():
            audit.observe(round_.task, own if guesses is None else own.with_pseudo_labels(guesses))


#: Makes a step that an option adds, given the accounting and the validation of the exchange.
OptionStep = Callable[[Accounting, Validation], Step]
