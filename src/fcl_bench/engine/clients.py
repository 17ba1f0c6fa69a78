"""The clients of a federation as a value, which both ends derive from the same settings over every transport."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fcl_bench.data.partitions.base import Holdings
from fcl_bench.engine.codec import Codec, Middleware, chained
from fcl_bench.engine.node import UNKNOWN, Node, NodeData
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.method import Method


@dataclass(frozen=True)
class Clients:
    """All that determines what each client does, except the samples themselves.

    Attributes:
        method, context: the method and its problem.
        holdings: [task][client] -> indices of training samples.
        columns: (n,) int64, each training sample's class.
        labelled: (n,) bool, which of these labels their clients know.
        middleware: the clients' side middleware, before the wire codec.
        run: identity of the work under way; both ends compare it.
        stage: which of the run's federations it is: "run", or "adapt" for the first stage.
        config: the run's resolved configuration, for a node that was not started with it.
        classes: for samples that stay at the clients' sites, [task] -> the columns of its classes; empty: the samples
            are those of one data set.
        parallel: how many train side by side in one process (`parallel_clients`).
        prepared: whether the samples are features of a network, which round by the threads of the process.
    """

    method: Method
    context: Context
    holdings: Sequence[Sequence[np.ndarray]]
    columns: np.ndarray
    labelled: np.ndarray
    middleware: Sequence[Middleware] = ()
    run: str = ""
    stage: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    classes: Sequence[Sequence[int]] = ()
    parallel: str = "1"
    prepared: bool = False

    @property
    def elsewhere(self) -> bool:
        """Whether the samples stay at the clients' sites: the server has none, and true labels are unknown."""
        return bool(self.classes)

    @property
    def count(self) -> int:
        """K."""
        return len(self.holdings[0])

    @property
    def tasks(self) -> int:
        """T."""
        return len(self.holdings)

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        """(K,) and (K,): how many samples of a task each client has, and how many of them are labelled."""
        holdings = Holdings.of(self.holdings[task])
        return holdings.sizes(), holdings.chosen(self.labelled)

    def rows(self, own: Collection[int]) -> np.ndarray:
        """The indices of the samples that these clients hold in any task, ascending."""
        parts = [clients[client] for clients in self.holdings for client in own]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)

    def node(self, inputs: torch.Tensor, own: Collection[int] | None = None) -> Node:
        """The node of some clients, which keeps only their samples.

        Args:
            inputs: the samples `rows(own)` in this order: features, or images in uint8.
            own: its clients; None: all clients, with the inputs of the whole data set.
        """
        holdings, columns, labelled, numbers = self.holdings, self.columns, self.labelled, None
        if own is not None:
            numbers = self.rows(own)
            if len(inputs) != len(numbers):
                raise ValueError(f"{len(inputs)} samples for clients that hold {len(numbers)}")
            columns, labelled = columns[numbers], labelled[numbers]
            nothing, own_clients = np.zeros(0, dtype=np.int64), frozenset(own)
            holdings = [
                Holdings.of(
                    np.searchsorted(numbers, clients[client]) if client in own_clients else nothing
                    for client in range(self.count)
                )
                for clients in self.holdings
            ]
        data = NodeData(self.context, holdings, np.where(labelled, columns, UNKNOWN), inputs, numbers)
        uploads = Uploads.of(self.method, self.context)
        chain = chained([*self.middleware, Codec.of_clients(uploads, self.context)])
        truth = None if self.elsewhere else self._right
        return Node(self.method.client(self.context), self.context, data, chain, uploads, truth)

    def _right(self, numbers: np.ndarray, guesses: torch.Tensor) -> int:
        """How many of the labels that a client gave these samples are true; the engine knows the true labels."""
        return int((guesses.cpu() == torch.from_numpy(self.columns[numbers])).sum())
