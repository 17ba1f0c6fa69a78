"""Clients whose upload does not arrive in time: their record, and when they may return."""

from __future__ import annotations

from typing import Literal, cast

from fcl_bench.engine.node import Lost
from fcl_bench.engine.state import FederationState
from fcl_bench.errors import UserError
from fcl_bench.protocol.method import Server
from fcl_bench.protocol.task import Task
from fcl_bench.tracking.console import Notices

#: What can become of a client whose upload does not arrive in time.
Missing = Literal["silent", "gone", "lost", "late"]
#: The reason given for the loss of a client that fails in simulation (`faults=`).
SIMULATED = ("silent", "gone")


class MissingClients:
    """The clients of a run that rounds continue without.

    Args:
        state: the run's state; it keeps the counts, and which clients may not return yet.
        server: decides when they may return.
        notices: informs the user.
        minimum: the least share of a round's clients that must answer over the transport; None: all.
        drops: whether clients with a bad upload are left out of the round.
    """

    def __init__(
        self, state: FederationState, server: Server, notices: Notices, minimum: float | None, drops: bool
    ) -> None:
        self._state, self._server, self._notices = state, server, notices
        self._minimum, self._drops = minimum, drops

    def lost(self, lost: Lost, task: Task, round_: int, gone: int, present: int) -> None:
        """Continue without a client whose failure is simulated, or that the transport may lose; else the run ends.

        Args:
            lost: the client.
            task, round_: the current ones.
            gone: how many of the `present` clients of the round the transport has lost so far.
        """
        if lost.reason in SIMULATED:
            self.note(cast(Missing, lost.reason), lost.client, task, round_)
            return
        where = f"client {lost.client} was lost in task {task.index}, round {round_}: {lost.reason}"
        remedy = "the same command goes on from the last checkpoint"
        if self._minimum is None:
            raise UserError(where, remedy)
        if present - gone < self._minimum * present:
            left = f"{present - gone} of {present} clients are left, and transport.minimum={self._minimum:g}"
            raise UserError(f"{where}; {left}", remedy)
        self._notices.tell(f"lost {lost.client}", f"{where}; the round goes on without it")
        self.note("lost", lost.client, task, round_)

    def note(self, why: Missing, client: int, task: Task, round_: int) -> None:
        """Count a client that is missing, and remember it where it may not return at once."""
        self._state.absences[why] += 1
        # Clients that may return are not remembered, since there can be as many of them as turns.
        if not self._server.may_return(task, round_, round_ + 1):
            self._state.missing.append((client, round_))

    def barred(self, task: Task, round_: int) -> set[int]:
        """Clients whose upload of this task is missing or was left out while the current round would build on it."""
        dropped = self._state.ledger.dropped(task.index) if self._drops else []
        absent = {*dropped, *map(tuple, self._state.missing)}
        return {client for client, refused in absent if not self._server.may_return(task, refused, round_)}
