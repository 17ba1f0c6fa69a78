"""A transport whose clients fail as `faults` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fcl_bench.engine.blob import packed, unpacked
from fcl_bench.engine.exchange import Answer, Late, Lost, Reply
from fcl_bench.engine.transport import Transport, Wrapper
from fcl_bench.errors import UserError
from fcl_bench.options.faults.choices import Fate, Faults
from fcl_bench.protocol.message import Message

#: Prefix of a checkpoint's tensors of uploads on their way; names of clients' states begin with the client's number.
_LATE, _EXCHANGES = "late.", "exchanges"


@dataclass(frozen=True)
class _OnItsWay:
    """A late upload, and the exchange or the task with which it arrives."""

    client: int
    upload: Message
    due: int


class Faulty(Wrapper):
    """Simulates faults between the loop and a transport.

    A client that is silent or gone is never asked, so it computes nothing and receives nothing. A late client has its
    turn in time, and its upload arrives at the beginning of a later exchange, before that round's own uploads. An
    upload that is still on its way when the run ends never arrives.
    """

    def __init__(self, inner: Transport, faults: Faults, seed: int) -> None:
        super().__init__(inner)
        self._faults, self._seed = faults, seed
        self._on_their_way: list[_OnItsWay] = []
        self._exchanges = 0

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Answer]:
        """First the late uploads that arrive, in order of task, round and client; then the clients of `present`."""
        task, by_task = broadcast.task, self._faults.late_unit == "task"
        now = task if by_task else self._exchanges
        self._exchanges += 1
        arriving = [late for late in self._on_their_way if late.due <= now]
        self._on_their_way = [late for late in self._on_their_way if late.due > now]
        for late in arriving:
            yield Reply(late.client, late.upload, 0.0, None, {}, 0)
        del arriving
        fates = self._fates(present, task, broadcast.round)
        answering = [client for client in present if fates[client] in (Fate.ANSWERS, Fate.LATE)]
        replies = self._inner.exchange(answering, broadcast)
        for client in present:
            fate = fates[client]
            if fate in (Fate.SILENT, Fate.GONE):
                yield Lost(client, fate.value)
                continue
            reply = next(replies)
            if fate is Fate.ANSWERS or not isinstance(reply, Reply):
                yield reply
                continue
            self._on_their_way.append(_OnItsWay(client, reply.upload, now + self._faults.late_by))
            yield Late(reply)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        """Only clients that are gone do not answer: silent and late clients fail with their upload only."""
        faults, there = self._faults, {}
        for client, request in requests.items():
            fates = faults.fates(self._seed, self.clients, request.task, request.round, 0)
            if fates[client] is Fate.GONE:
                yield Lost(client, Fate.GONE.value)
            else:
                there[client] = request
        yield from super().ask(there)

    def _fates(self, present: Sequence[int], task: int, round_: int) -> np.ndarray:
        """(K,) the fate of each client; silent clients are asked again until enough of `present` answer."""
        faults, chosen = self._faults, np.asarray(present, dtype=int)
        wanted = 0 if self._alone(present, task) else min(faults.min_clients, len(chosen))
        fates = faults.fates(self._seed, self.clients, task, round_, 0)
        for attempt in range(1, 1 + faults.attempts):
            if sum(fate is Fate.ANSWERS for fate in fates[chosen]) >= wanted:
                return fates
            again = faults.fates(self._seed, self.clients, task, round_, attempt)
            fates = np.where([fate is Fate.SILENT for fate in fates], again, fates)
        answers = sum(fate is Fate.ANSWERS for fate in fates[chosen])
        if answers < wanted:
            raise UserError(
                f"{answers} of {len(chosen)} clients answer in task {task}, round {round_}, and it takes {wanted}",
                "fewer faults, or a smaller faults.min_clients (0: a round may go without an answer)",
            )
        return fates

    def _alone(self, present: Sequence[int], task: int) -> bool:
        """Whether a round asks one client where several have samples of the task: others have rounds of their own."""
        return len(present) == 1 and int(np.count_nonzero(self.samples(task)[1])) > 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the clients keep, and the uploads on their way."""
        saved = {_LATE + _EXCHANGES: torch.tensor(self._exchanges)}
        for number, late in enumerate(self._on_their_way):
            blob = packed(late.upload, client=late.client, due=late.due)
            saved[f"{_LATE}{number}"] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        return {**super().state_dict(), **saved}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""
        own = {name.removeprefix(_LATE): value for name, value in states.items() if name.startswith(_LATE)}
        super().load_state_dict({name: value for name, value in states.items() if not name.startswith(_LATE)})
        self._exchanges = int(own.pop(_EXCHANGES))
        self._on_their_way = []
        for number in sorted(own, key=int):
            upload, beside = unpacked(own[number].cpu().numpy().tobytes())
            self._on_their_way.append(_OnItsWay(beside["client"], upload, beside["due"]))
