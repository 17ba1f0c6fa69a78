"""How a broadcast reaches the clients, and how their uploads come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import torch

from fcl_bench.engine.clients import Clients
from fcl_bench.engine.keeper import Keeper, resolved
from fcl_bench.engine.middleware import Middleware
from fcl_bench.engine.node import ClientData, Late, Lost, Masked, Node, Reply, Total
from fcl_bench.engine.raw import RawSamples
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method
from fcl_bench.protocol.problem import Problem


class Transport(Protocol):
    """Carries messages between the server's process and the clients', wherever they are.

    Attributes:
        clients: K.
        everything: the clients' data, for audits; None where the server's process does not see them.
        raw: what a sample would cost as it is; None where nobody says.
    """

    clients: int

    @property
    def raw(self) -> RawSamples | None: ...

    @property
    def everything(self) -> ClientData | None: ...

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        """(K,) and (K,): how many samples of a task each client has, and how many of them are labelled."""

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late | Masked | Total]:
        """The broadcast's round: a reply for each client of `present`, in this order, whatever order they arrive in.

        The order matters: FedRAN's sequential merge gives another result in another one. Before them come the uploads
        of earlier rounds that are late; their replies have nothing but the upload, which says its task and round.
        Behind those whose upload is masked comes the sum of them.
        """

    def refused(self, client: int) -> None:
        """The upload of the client's last turn was left out: it keeps what it kept before that turn."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the clients of this process keep; a transport whose clients are elsewhere has them keep it there, and
        returns by what name they find it again."""

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            UserError: clients elsewhere do not have what they kept.
        """


class Asking(Transport, Protocol):
    """A transport over which the server's side may speak with clients' middlewares, too."""

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        """What clients' middlewares answer to requests, each client to its own, in this order.

        It is no turn: nothing of the method is asked, and the replies have nothing but the answer and its seconds.
        """


class Around:
    """A transport that stands between the loop and another one, and is that one but for what a subclass says.

    Args:
        inner: reaches the clients.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.clients = inner.clients

    @property
    def everything(self) -> ClientData | None:
        return self._inner.everything

    @property
    def raw(self) -> RawSamples | None:
        return self._inner.raw

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._inner.samples(task)

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late | Masked | Total]:
        return self._inner.exchange(present, broadcast)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        """See `Asking`, which the inner one then is."""
        return cast(Asking, self._inner).ask(requests)

    def refused(self, client: int) -> None:
        self._inner.refused(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._inner.state_dict()

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self._inner.load_state_dict(states)


class InProcess:
    """All clients in this process, one after the other.

    Args:
        node: with all of them.
        kept: where processes of clients kept their states, for a run that went over several processes before.
    """

    def __init__(self, node: Node, kept: Keeper | None = None) -> None:
        self._node, self._kept = node, kept
        self.clients = node.data.clients

    @classmethod
    def of(
        cls,
        method: Method,
        problem: Problem,
        holdings: Sequence[Sequence[np.ndarray]],
        columns: np.ndarray,
        labelled: np.ndarray,
        inputs: torch.Tensor,
        middleware: Sequence[Middleware] = (),
    ) -> InProcess:
        """The clients of a data set: of `inputs`, and what else `Clients` is made of."""
        return cls(Clients(method, problem, holdings, columns, labelled, middleware).node(inputs))

    @property
    def everything(self) -> ClientData:
        return self._node.data

    @property
    def raw(self) -> RawSamples:
        return self._node.data.raw

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._node.data.holdings[task].sizes(), self._node.data.labelled(task)

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        for client in present:
            self._node.settle()
            yield self._node.turn(client, broadcast)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        for client, request in requests.items():
            yield self._node.answer(client, request)

    def refused(self, client: int) -> None:
        self._node.take_back(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._node.state_dict()

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self._node.load_state_dict(resolved(states, range(self.clients), self._kept))
