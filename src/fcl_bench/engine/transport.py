"""How a broadcast reaches the clients, and how their uploads come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import torch

from fcl_bench.engine.batched_clients import BatchedClients, group_size
from fcl_bench.engine.client_state import ClientStore, resolved
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.exchange import Answer, Late, Lost, Reply
from fcl_bench.engine.exchanges import RawSamples
from fcl_bench.engine.node import Node, NodeData
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method


class Transport(Protocol):
    """Carries messages between the server's process and the clients', wherever they are.

    Attributes:
        clients: K.
        complete: whether every client that is asked answers in its round.
        everything: the clients' data, for audits; None where the server's process does not see them.
        raw: the cost of sending a sample as it is; None if it is unknown.
    """

    clients: int
    complete: bool

    @property
    def raw(self) -> RawSamples | None: ...

    @property
    def everything(self) -> NodeData | None: ...

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        """(K,) and (K,): how many samples of a task each client has, and how many of them are labelled."""

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Answer]:
        """Run the broadcast's round: yields a reply for each client of `present`, in this order, not that of arrival.

        The order matters: FedRAN's sequential merge gives another result in another order. Late uploads of earlier
        rounds come first; their replies contain only the upload, which has its task and round. After clients with
        masked uploads comes the sum of these uploads.
        """

    def refused(self, client: int) -> None:
        """The upload of the client's last turn was left out: its state is again the one before that turn."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The states of this process's clients. If clients are elsewhere, their states are saved there, and
        this is the name under which they find them again."""

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            UserError: clients elsewhere no longer have their states.
        """


class Asking(Transport, Protocol):
    """A transport over which the server's side may speak with clients' middlewares, too."""

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        """The answers of clients' middlewares to requests, each client to its own, in this order.

        This is not a turn: the method is not called, and the replies contain only the answer and its seconds.
        """


class Wrapper:
    """A transport around another one. It passes everything on to that one except what a subclass overrides.

    Args:
        inner: reaches the clients.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.clients = inner.clients
        self.complete = False

    @property
    def everything(self) -> NodeData | None:
        return self._inner.everything

    @property
    def raw(self) -> RawSamples | None:
        return self._inner.raw

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._inner.samples(task)

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Answer]:
        return self._inner.exchange(present, broadcast)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        """See `Asking`; the inner transport then has to be one."""
        return cast(Asking, self._inner).ask(requests)

    def refused(self, client: int) -> None:
        self._inner.refused(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._inner.state_dict()

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self._inner.load_state_dict(states)


class InProcess:
    """All clients in this process, in turn.

    Args:
        node: the node of all clients.
        store: where processes of clients saved their states, for a run that used several processes before.
        batched: takes turns whose training is done side by side; None: each client does all of its own.
    """

    complete = True

    def __init__(self, node: Node, store: ClientStore | None = None, batched: BatchedClients | None = None) -> None:
        self._node, self._store, self._batched = node, store, batched
        self.clients = node.data.clients

    @classmethod
    def of(
        cls,
        method: Method,
        context: Context,
        holdings: Sequence[Sequence[np.ndarray]],
        columns: np.ndarray,
        labelled: np.ndarray,
        inputs: torch.Tensor,
        middleware: Sequence[Middleware] = (),
        parallel: str = "1",
    ) -> InProcess:
        """The transport for the clients of a data set: `inputs`, and the other arguments of `Clients`."""
        parts = (method, context, holdings, columns, labelled, middleware)
        return cls.over(Clients(*parts, parallel=parallel), inputs)

    @classmethod
    def over(cls, clients: Clients, inputs: torch.Tensor, store: ClientStore | None = None) -> InProcess:
        """The transport for `clients`, as many of them side by side as they are to be."""
        node, device = clients.node(inputs), clients.context.device
        size = group_size(clients.parallel, device)
        return cls(node, store, BatchedClients(node, size, device) if size > 1 else None)

    @property
    def everything(self) -> NodeData:
        return self._node.data

    @property
    def raw(self) -> RawSamples:
        return self._node.data.raw

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._node.data.holdings[task].sizes(), self._node.data.labelled(task)

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        if self._batched is not None:
            yield from self._batched.turns(present, broadcast)
            return
        for client in present:
            self._node.commit()
            yield self._node.turn(client, broadcast)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        for client, request in requests.items():
            yield self._node.answer(client, request)

    def refused(self, client: int) -> None:
        self._node.rollback(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._node.state_dict()

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self._node.load_state_dict(resolved(states, range(self.clients), self._store))
