"""A transport that brings the sum of a round's uploads in place of the uploads."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fcl_bench.engine.exchange import Answer, Late, Lost, Reply
from fcl_bench.engine.transport import Asking, Wrapper
from fcl_bench.errors import UserError
from fcl_bench.options.secure.aggregation import Aggregation
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.secure.party import KEYS, SHARES, TAKE_IN, UNMASKING
from fcl_bench.options.secure.sums import Extra, Masked, Total
from fcl_bench.protocol.message import Message


class SummingTransport(Wrapper):
    """It stands between the loop and a transport, with `Parties` at the clients' side of it.

    A round's clients send public keys, then shares of their secrets, then masked uploads, and those whose upload came
    help to unmask the sum. Who fails in between fails after it has shared its keys, and its masks are taken out of the
    sum; one that is gone has no keys. A late upload is lost: its masks are taken out before it arrives.

    A round's secrets end with the round, so that a checkpoint has none.

    Args:
        apart: stages whose uploads the server sees one by one.
    """

    def __init__(self, inner: Asking, secure: SecureSums, seed: int, apart: Collection[str] = ()) -> None:
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

    def refused(self, client: int) -> None:
        raise UserError(f"the upload of client {client} cannot be left out of a sum", "on_bad_upload=fail")
