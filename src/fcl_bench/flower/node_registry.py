"""Which node each client lives on, by the nodes' own censuses: a node that is restarted has a new number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from fcl_bench.engine.remote.process_info import ProcessInfo
from fcl_bench.errors import UserError
from fcl_bench.flower.turns import PROTOCOL

log = logging.getLogger(__name__)


class NodeInfo(NamedTuple):
    """A node's description of itself.

    Attributes:
        census: versions, threads, the clients that live there, and how many samples they have.
        data: hash of the node's data.
        platform: what it runs on.
    """

    census: ProcessInfo
    data: str
    platform: str

    @classmethod
    def read(cls, about: dict[str, Any]) -> NodeInfo:
        """Return what a worker's answer says.

        Raises:
            UserError: it is of another version.
        """
        beside = about.pop("beside", {})
        if beside.get("protocol") != PROTOCOL:
            raise UserError(
                f"{about.get('process', 'a node')} speaks protocol {beside.get('protocol')}, the server {PROTOCOL}",
                "the same version of fcl-bench everywhere",
            )
        return cls(ProcessInfo(**about), beside["data"], beside["platform"])

    def about(self) -> dict[str, Any]:
        """Return the entry for run.json."""
        census = self.census
        return {
            **{"clients": census.clients, "fcl_bench": census.package, "torch": census.torch_version},
            **{"threads": census.threads, "device": census.device, "platform": self.platform, "data": self.data},
        }


class NodeRegistry:
    """The nodes that have reported which clients live there.

    Args:
        clients: K.
        tasks: T.
        check: raises a `UserError` for a census that does not fit the run.
    """

    def __init__(self, clients: int, tasks: int, check: Callable[[ProcessInfo], None]) -> None:
        self._check = check
        self._nodes: dict[str, NodeInfo] = {}
        #: client -> node.
        self._of: dict[int, str] = {}
        self.samples, self.labelled = np.zeros((2, tasks, clients), dtype=np.int64)
        #: Per client, the hash of its node's data.
        self.data: dict[int, str] = {}

    def enter(self, node: str, resident: NodeInfo) -> None:
        """Record a census. Clients that lived on another node have moved, and that node is gone.

        Raises:
            UserError: the node is no part of this run.
        """
        census, clients = resident.census, self.samples.shape[1]
        if not all(0 <= client < clients for client in census.clients):
            raise UserError(f"{census.process} is of no use to clients={clients}", f"clients 0 to {clients - 1}")
        self._check(census)
        for client in census.clients:
            if (former := self._of.get(client, node)) != node:
                log.info("%s has come back as another one", self._nodes[former].census.process)
                self.leave(former)
            if self.data.get(client, resident.data) != resident.data:
                raise UserError(f"{census.process} came back with other data", "the data as they were")
        self.samples[:, census.clients], self.labelled[:, census.clients] = census.samples, census.labelled
        self.data |= dict.fromkeys(census.clients, resident.data)
        self._nodes[node] = resident
        self._of |= dict.fromkeys(census.clients, node)

    def leave(self, node: str) -> None:
        """Forget a node that is gone, or silent."""
        self._nodes.pop(node, None)
        self._of = {client: home for client, home in self._of.items() if home != node}

    def forget(self) -> None:
        """Forget all nodes, so that each has to report again."""
        self._nodes, self._of = {}, {}

    def __contains__(self, node: str) -> bool:
        return node in self._nodes

    @property
    def residents(self) -> list[NodeInfo]:
        """Return what the nodes say of themselves, in the order of their first clients."""
        return sorted(self._nodes.values(), key=lambda resident: resident.census.clients)

    @property
    def nodes(self) -> list[str]:
        """Return the nodes' numbers."""
        return list(self._nodes)

    def by_node(self, clients: Iterable[int]) -> dict[str, list[int]]:
        """Return the nodes of these clients, each with those that live there; clients without a node are left out."""
        found: dict[str, list[int]] = {}
        for client in clients:
            if (node := self._of.get(client)) is not None:
                found.setdefault(node, []).append(client)
        return found

    def homeless(self) -> list[int]:
        """Return the clients that no node has claimed."""
        return [client for client in range(self.samples.shape[1]) if client not in self._of]
