"""What the server's process knows of masked uploads: that a client sent one, and the sum of a round's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fcl_bench.engine.exchange import SUMMED, Accounting, Arrival, Reply, Round, Step, Turn
from fcl_bench.engine.single_sample_leakage import Grouped, revealed
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import EVERYONE
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Masked:
    """A client that has had its turn, and whose upload is unreadable to the server until the `Total` comes."""

    reply: Reply

    def turn(self, round_: Round) -> Turn:
        """A turn that brings nothing by itself."""
        return Turn(self.reply.client, self.reply, SUMMED)


class Extra:
    """The cost of a round's exchanges around the uploads: (K,) per client, lost ones included, and the server's."""

    def __init__(self, clients: int) -> None:
        counted = {"up_bytes": np.int64, "down_bytes": np.int64, "client_seconds": np.float64}
        self.columns = {name: np.zeros(clients, dtype=kind) for name, kind in counted.items()}
        self.server_seconds = 0.0

    def add(self, client: int, request: Message, answer: Reply) -> None:
        """Add one exchange."""
        cost = {"up_bytes": answer.upload.nbytes, "down_bytes": request.nbytes, "client_seconds": answer.seconds}
        for name, own in cost.items():
            self.columns[name][client] += own


@dataclass(frozen=True)
class Total:
    """The sum of a round's masked uploads, and what it cost besides these.

    Attributes:
        rounding: the largest error of an entry of the sum.
    """

    clients: tuple[int, ...]
    upload: Message
    rounding: float
    extra: Extra

    def turn(self, round_: Round) -> Turn:
        """A turn of everyone; its costs are the round's."""
        for name, own in self.extra.columns.items():
            round_.columns[name] += own
        round_.watch.seconds += self.extra.server_seconds
        announced = round_.held.counts(list(self.clients))
        arrival = Arrival(EVERYONE, self.upload, announced, len(self.clients), exact=True, rounding=self.rounding)
        return Turn(EVERYONE, arrival=arrival)


class SummedUploads(Step):
    """Counts what sums reveal, and restores the counts of samples in noisy ones."""

    def __init__(self, accounting: Accounting, context: Context) -> None:
        self._accounting, self._release = accounting, context.release
        self._notices = Notices(log)

    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        #: For clients whose uploads are masked, which sums their samples are in.
        hidden: dict[int, Grouped] = {}
        for turn in turns:
            if turn.fate == SUMMED and turn.reply is not None and turn.reply.grouped is not None:
                hidden[turn.client] = turn.reply.grouped
            if turn.client == EVERYONE and turn.arrival is not None:
                turn.arrival = self._total(round_, turn.arrival)
                for client, alone in revealed(hidden).items():
                    self._accounting.reveal(round_, client, alone)
            yield turn
            del turn

    def _total(self, round_: Round, total: Arrival) -> Arrival:
        """A sum, with whole counts of samples; tells the user if it is that of one client."""
        if total.clients == 1:
            self._notices.tell(
                "alone",
                f"task {round_.task.index}, round {round_.number} has one client, whose upload the sum is; rounds like"
                " this hide nothing",
            )
        if self._release is None:
            return total
        return replace(total, upload=self._release.counted(total.upload))
