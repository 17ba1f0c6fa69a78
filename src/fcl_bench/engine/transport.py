"""How a broadcast reaches the clients, and how their uploads come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from fcl_bench.engine.codec import Codec
from fcl_bench.engine.middleware import Chain, Middleware
from fcl_bench.engine.node import UNKNOWN, ClientData, Late, Lost, Masked, Node, Reply, Total
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method
from fcl_bench.protocol.problem import Problem


class Transport(Protocol):
    """Carries messages between the server's process and the clients', wherever they are.

    Attributes:
        clients: K.
        everything: the clients' data, for audits and for counting right pseudo-labels; None where the server's process
            does not see them.
    """

    clients: int

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

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        """What clients' middlewares answer to requests, each client to its own, in this order.

        It is no turn: nothing of the method is asked, and the replies have nothing but the answer and its seconds.
        """

    def refused(self, client: int) -> None:
        """The upload of the client's last turn was left out: it keeps what it kept before that turn."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the clients of this process keep; a transport whose clients are elsewhere has them keep it there."""

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""


class InProcess:
    """All clients in this process, one after the other.

    Args:
        node: with all of them.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
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
        """The clients of a data set.

        Args:
            method, problem: what is run.
            holdings: [task][client] -> indices of training samples.
            columns: (n,) int64, each training sample's class.
            labelled: (n,) bool, which of these labels their clients know.
            inputs: (n, ...) features, or images in uint8.
            middleware: what messages pass through on the clients' side before the wire codec.
        """
        data = ClientData(problem, holdings, np.where(labelled, columns, UNKNOWN), inputs)
        chain = Chain([*middleware, Codec.of_clients(problem)])
        return cls(Node(method.client(problem), problem, data, chain))

    @property
    def everything(self) -> ClientData:
        return self._node.data

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._node.data.holdings[task].sizes(), self._node.data.labelled(task)

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        for client in present:
            yield self._node.turn(client, broadcast)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        for client, request in requests.items():
            yield self._node.answer(client, request)

    def refused(self, client: int) -> None:
        self._node.take_back(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._node.state_dict()

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self._node.load_state_dict(states)
