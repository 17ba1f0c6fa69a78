"""Clients whose upload does not arrive in time: their record, what arrives late, and when they may return."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, cast

from fcl_bench.engine.exchange import LATE, LOST, Arrival, Round, Step, Turn, schema_of
from fcl_bench.engine.transport import Transport
from fcl_bench.engine.validation import Validation
from fcl_bench.errors import UserError
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.fields import SampleCounts
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server
from fcl_bench.tracking.console import Notices

if TYPE_CHECKING:
    from fcl_bench.engine.loop import FederationState

#: What can become of a client whose upload does not arrive in time.
Missing = Literal["silent", "gone", "lost", "late"]
#: The reason given for the loss of a client that fails in simulation (`faults=`).
SIMULATED = ("silent", "gone")


class MissingClients(Step):
    """The clients of a run that rounds continue without.

    Args:
        state: the run's state; it holds the counts, and which clients may not return yet.
    """

    def __init__(
        self,
        state: FederationState,
        server: Server,
        transport: Transport,
        validation: Validation,
        tasks: Sequence[Task],
        notices: Notices,
        minimum: float | None,
        drops: bool,
    ) -> None:
        self._state, self._server, self._validation, self._notices = state, server, validation, notices
        self._transport, self._tasks, self._sums = transport, tasks, server.context.sums
        self._minimum, self._drops = minimum, drops

    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        gone = 0
        for turn in turns:
            if turn.fate == LOST:
                gone += turn.reason not in SIMULATED
                self._lost(round_, turn, gone)
                round_.columns[LOST][turn.client] = 1
            elif turn.fate == LATE:
                self._note("late", turn.client, round_)
                round_.columns[LATE][turn.client] = 1
                if not self._sums:
                    self._server.await_late(round_.task)
            elif turn.earlier is not None:
                with round_.watch.running():
                    self._absorb_earlier(round_, turn.client, turn.earlier)
                turn.earlier = None
            yield turn
            del turn

    def _lost(self, round_: Round, turn: Turn, gone: int) -> None:
        """Continue without a client whose failure is simulated, or that the transport may lose; else the run ends.

        `gone` is how many of the round's clients the transport has lost.
        """
        if turn.reason in SIMULATED:
            self._note(cast(Missing, turn.reason), turn.client, round_)
            return
        where = f"client {turn.client} was lost in task {round_.task.index}, round {round_.number}: {turn.reason}"
        remedy = "the same command goes on from the last checkpoint"
        if self._minimum is None:
            raise UserError(where, remedy)
        present = len(round_.present)
        if present - gone < self._minimum * present:
            left = f"{present - gone} of {present} clients are left, and transport.minimum={self._minimum:g}"
            raise UserError(f"{where}; {left}", remedy)
        self._notices.tell(f"lost {turn.client}", f"{where}; the round goes on without it")
        self._note("lost", turn.client, round_)

    def _note(self, why: Missing, client: int, round_: Round) -> None:
        """Count a client that is missing, and remember it where it may not return at once."""
        self._state.absences[why] += 1
        # Clients that may return are not remembered, since there can be as many of them as turns.
        if not self._server.may_return(round_.task, round_.number, round_.number + 1):
            self._state.missing.append((client, round_.number))

    def _absorb_earlier(self, round_: Round, client: int, upload: Message) -> None:
        """Absorb an upload of an earlier round, if the server can still use it."""
        absences, task = self._state.absences, self._tasks[upload.task]
        absences["late_arrived"] += 1
        if self._sums:
            text = "late uploads are left out: the masks of their round are gone (secure=sums)"
            self._notices.tell("late", text, logging.INFO)
            return
        stage = self._server.late_stage(task, upload.round)
        if stage is None:
            self._notices.tell("late", "late uploads are of no use to this method and are left out", logging.INFO)
            return
        samples, _ = self._transport.samples(task.index)
        counts = SampleCounts(int(samples[client]), int(round_.held.announced[client]))
        read = self._validation.read(Arrival(client, upload, counts), schema_of(self._server, task, stage))
        if read is None:
            absences["late_dropped"] += 1
            self._server.lose_late(task)
            return
        if task.index < round_.task.index:
            self._server.absorb_late(client, read, task)
        else:
            self._server.absorb(client, read)
        absences["late_absorbed"] += 1

    def barred(self, task: Task, round_: int) -> set[int]:
        """Clients whose upload of this task is missing or was left out while the current round would build on it."""
        dropped = self._state.ledger.dropped(task.index) if self._drops else []
        absent = {*dropped, *map(tuple, self._state.missing)}
        return {client for client, refused in absent if not self._server.may_return(task, refused, round_)}
