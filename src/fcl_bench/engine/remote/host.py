"""The far end: a process of clients that answers what the server asks."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch

from fcl_bench.engine.client_state import Keeper, resolved
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.node import Node
from fcl_bench.engine.remote.process_info import ProcessInfo
from fcl_bench.engine.remote.replies import Received, deserialise, on, reply_said, serialise
from fcl_bench.errors import UserError
from fcl_bench.protocol.message import Message

log = logging.getLogger(__name__)


class Host:
    """The clients of one process in one federation.

    Args:
        process: its name, for messages.
        clients: of the whole federation.
        own: who lives here.
        inputs: their samples, as `Clients.node` takes them.
        keeper: where their states are kept with the server's checkpoints.
    """

    def __init__(
        self, process: str, clients: Clients, own: range | list[int], inputs: torch.Tensor, keeper: Keeper
    ) -> None:
        self.node: Node = clients.node(inputs, own)
        self.own, self._residents = list(own), frozenset(own)
        self._device = clients.context.device
        self._keeper = keeper
        self.census = ProcessInfo.of(process, clients, own, self.node.data.raw)

    def answers(self, request: Received) -> Iterator[bytes]:
        """What is answered to a request: one blob, or one for each turn. Work is done as they are asked for."""
        beside = request.beside
        for client in filter(self._has, beside.get("refused", ())):
            self.node.rollback(client)
        if request.kind == "census":
            yield serialise("census", **self.census.state())
        elif request.kind == "exchange":
            for reply in self.turns(beside["clients"], on(request.message, self._device)):
                yield reply_said(reply)
        elif request.kind == "save":
            self.save(beside["tag"])
            yield serialise("saved")
        elif request.kind == "restore":
            self.restore(dict(request.message))
            yield serialise("restored")
        elif request.kind == "forget":
            self.forget()
            yield serialise("forgotten")
        else:
            raise ValueError(f"{request.kind} is nothing that a process of clients does")

    def turns(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply]:
        """The replies of those clients of a round that live here; a turn is done when its reply is asked for."""
        self.node.commit()
        for client in filter(self._has, present):
            yield self.node.turn(client, broadcast)

    def _has(self, client: int) -> bool:
        return client in self._residents

    def save(self, tag: str) -> None:
        """Keep the clients' states on this process's disk."""
        self._keeper.save(tag, self.own, self.node.state_dict())

    def forget(self) -> None:
        """Delete what the clients kept on this process's disk, which the server's process may not see."""
        self._keeper.forget()

    def restore(self, states: dict[str, torch.Tensor]) -> None:
        """Go on from what the server's checkpoint says of these clients."""
        self.node.load_state_dict(resolved(states, self.own, self._keeper))


def answered(blob: bytes | memoryview, answers: Callable[[Received], Iterator[bytes]]) -> Iterator[bytes]:
    """The answers of a process to a request; an error is also an answer, and the last one."""
    try:
        yield from answers(deserialise(blob))
    except UserError as error:
        yield serialise("user error", what=error.what, remedy=error.remedy)
    except Exception as error:
        log.debug("the request failed", exc_info=True)
        yield serialise("error", text="".join(traceback.format_exception(error)))


def states_of(states: dict[str, torch.Tensor], own: list[int]) -> Message:
    """The part of a server's checkpoint that these clients need, to be sent with the request to restore."""
    kept = frozenset(own)
    chosen = {name: value for name, value in states.items() if not _client(name) or int(name.partition(".")[0]) in kept}
    return Message(chosen)


def _client(name: str) -> bool:
    return name.partition(".")[0].isdigit()
