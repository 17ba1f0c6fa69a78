"""The far end: a process of clients that answers what the server asks."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch

from fcl_bench.engine.checkpoint import ClientStore, resolved, tag_of
from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.node import Node
from fcl_bench.engine.remote.replies import Received, deserialise, on_device, serialise, serialise_reply
from fcl_bench.engine.transport import Clients
from fcl_bench.errors import UserError
from fcl_bench.protocol.message import Message

log = logging.getLogger(__name__)


class Host:
    """The clients of one process in one federation."""

    def __init__(self, clients: Clients, own: range | list[int], inputs: torch.Tensor, store: ClientStore) -> None:
        self.node: Node = clients.node(inputs, own)
        self.own = list(own)
        self._device = clients.context.device
        #: On this process's disk, which the server's process may not see.
        self.store, self._last_tag = store, ""

    def answers(self, request: Received) -> Iterator[bytes]:
        """The answers to a request: one blob, or one for each turn. Work is done as they are asked for."""
        beside = request.beside
        for client in self._here(beside.get("refused", ())):
            self.node.rollback(client)
        if request.kind == "exchange":
            for reply in self.turns(beside["clients"], on_device(request.message, self._device)):
                yield serialise_reply(reply)
            return
        if request.kind == "ask":
            for client, own in request.parts():
                yield serialise_reply(self.node.answer(client, own))
            return
        if request.kind == "save":
            self.save(beside["tag"])
        elif request.kind == "restore":
            self.restore(dict(request.message))
        elif request.kind == "delete":
            self.store.delete()
        else:
            raise ValueError(f"{request.kind} is nothing that a process of clients does")
        yield serialise("done")

    def turns(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply]:
        """The replies of this process's clients of a round; a turn is done when its reply is asked for."""
        self.node.commit()
        for client in self._here(present):
            with self.node.computing():
                reply = self.node.turn(client, broadcast)
            yield reply

    def _here(self, clients: Sequence[int]) -> list[int]:
        own = frozenset(self.own)
        return [client for client in clients if client in own]

    def save(self, tag: str) -> None:
        """Save the clients' states on this process's disk, before the server saves its own.

        The save before this one stays, since the server may be killed in between.
        """
        self.store.save(tag, self.own, self.node.state_dict())
        self.store.prune((tag, self._last_tag))
        self._last_tag = tag

    def restore(self, states: dict[str, torch.Tensor]) -> None:
        """Go on from what the server's checkpoint says of these clients."""
        self.node.load_state_dict(resolved(states, self.own, self.store))
        self._last_tag = tag_of(states)


def answered(blob: bytes | memoryview, answers: Callable[[Received], Iterator[bytes]]) -> Iterator[bytes]:
    """The answers of a process to a request; an error is also an answer, and the last one."""
    try:
        yield from answers(deserialise(blob))
    except UserError as error:
        yield serialise("user error", what=error.what, remedy=error.remedy)
    except Exception as error:
        log.debug("the request failed", exc_info=True)
        yield serialise("error", text="".join(traceback.format_exception(error)))
