"""Brings the sum of a round's uploads in place of the uploads, and counts what the sum reveals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fcl_bench.engine.exchange import SUMMED, Accounting, Answer, Arrival, Late, Lost, Reply, Round, Step, Turn
from fcl_bench.engine.single_sample_leakage import Grouped, revealed
from fcl_bench.engine.transport import Transport, Wrapper
from fcl_bench.options.secure.aggregation import Aggregation
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.secure.party import KEYS, SHARES, TAKE_IN, UNMASKING
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
            if turn.fate == SUMMED and turn.reply is not None:
                if turn.reply.grouped is not None:
                    hidden[turn.client] = turn.reply.grouped
                elif turn.reply.revealed is not None:  # of another process: the sum reveals as much or less
                    self._accounting.reveal(round_, turn.client, turn.reply.revealed)
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


class SummingTransport(Wrapper):
    """It stands between the loop and a transport, with `Parties` at the clients' side of it.

    A round's clients send public keys, then shares of their secrets, then masked uploads, and those whose upload came
    help to unmask the sum. Who fails in between fails after it has shared its keys, and its masks are taken out of the
    sum; one that is gone has no keys. A late upload is lost: its masks are taken out before it arrives.

    A round's secrets end with the round, so that a checkpoint has none.

    Args:
        apart: stages whose uploads the server sees one by one.
    """

    def __init__(self, inner: Transport, secure: SecureSums, seed: int, apart: Collection[str] = ()) -> None:
        super().__init__(inner)
        self._secure, self._seed, self._apart = secure, seed, frozenset(apart)

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Answer]:
        """Yield each client of `present` as it masks its upload or is lost, then the sum of the masked uploads."""
        if broadcast.stage in self._apart:
            yield from self._inner.exchange(present, broadcast)
            return
        extra = Extra(self.clients)
        keys, lost = self._answers_to(present, KEYS, lambda client: {}, broadcast, extra)
        yield from lost
        aggregation = Aggregation(self._secure, self._seed, broadcast, keys)
        shared, lost = self._answers_to(keys, SHARES, aggregation.shares_request, broadcast, extra)
        yield from lost
        for client, answer in shared.items():
            aggregation.take_shares(client, answer)
        there, lost = self._answers_to(shared, TAKE_IN, aggregation.take_in_request, broadcast, extra)
        yield from lost
        for reply in self._inner.exchange([*there], broadcast):
            if isinstance(reply, Reply) and (reply.upload.task, reply.upload.round) == (
                broadcast.task,
                broadcast.round,
            ):
                begin = time.perf_counter()
                aggregation.add(reply.client, reply.upload)
                extra.server_seconds += time.perf_counter() - begin
                yield Masked(reply)
            elif isinstance(reply, Late):
                # What it reveals it would reveal alone, and it never becomes readable.
                yield Late(replace(reply.reply, revealed=None))
            else:
                yield reply
            del reply
        if not shared:
            return
        aggregation.require_enough()
        # The uploads of all of these are in the sum, so that none is lost.
        asked, request = aggregation.survivors, aggregation.unmasking_request
        helped, _ = self._answers_to(asked, UNMASKING, request, broadcast, extra)
        begin = time.perf_counter()
        total = aggregation.unmasked(helped)
        extra.server_seconds += time.perf_counter() - begin
        clients, rounding = tuple(aggregation.survivors), len(aggregation.survivors) * self._secure.step / 2
        yield Total(clients, total, rounding, extra)

    def _answers_to(
        self,
        clients: Iterable[int],
        stage: str,
        request: Callable[[int], Mapping[str, torch.Tensor]],
        broadcast: Message,
        extra: Extra,
    ) -> tuple[dict[int, Message], list[Lost]]:
        """Return the clients' answers to what each is asked besides the round's upload, and who gave none."""
        made = {
            client: Message(request(client), stage, task=broadcast.task, round=broadcast.round) for client in clients
        }
        answers = list(self.ask(made))
        given = [answer for answer in answers if isinstance(answer, Reply)]
        for answer in given:
            extra.add(answer.client, made[answer.client], answer)
        lost = [answer for answer in answers if isinstance(answer, Lost)]
        return {answer.client: answer.upload for answer in given}, lost
