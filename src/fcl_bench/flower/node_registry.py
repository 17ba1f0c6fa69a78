"""Which node each client is on, by what the nodes say: a node that is restarted has a new number."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import fcl_bench
from fcl_bench.engine.blob import BadMessage
from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.remote.process_info import ProcessInfo
from fcl_bench.engine.transport import Clients
from fcl_bench.engine.validation import MOST_SAMPLES
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeInfo(ProcessInfo):
    """A node's description of itself.

    Attributes:
        clients: of the node, ascending.
        samples, labelled: [task][client of `clients`], counts.
        raw: what a sample would cost as it is; None: nobody says.
        data, platform: hash of its data, and what it runs on.
        software: see `software`.
    """

    clients: list[int]
    samples: list[list[int]]
    labelled: list[list[int]]
    raw: RawSamples
    data: str
    platform: str
    software: dict[str, str]

    @classmethod
    def of(cls, process: str, clients: Clients, own: list[int], raw: RawSamples, data: str) -> NodeInfo:
        """Of this process, the node of the clients `own`, ascending."""
        counts = [clients.samples(task) for task in range(clients.tasks)]
        return cls.here(
            process,
            clients.run,
            clients.context,
            clients.prepared,
            clients=own,
            samples=[samples[own].tolist() for samples, _ in counts],
            labelled=[labelled[own].tolist() for _, labelled in counts],
            raw=raw,
            data=data,
            platform=f"{platform.system()} {platform.machine()}",
            software=software(),
        )

    def record_entry(self) -> dict[str, Any]:
        return {
            "clients": self.clients,
            **super().record_entry(),
            "device": self.device,
            "platform": self.platform,
            "data": self.data,
            "software": self.software,
        }


@cache
def software() -> dict[str, str]:
    """A hash of all modules of fcl_bench as they are on the disk, and the versions of packages that decide numbers."""
    digest, folder = content_hash(), Path(fcl_bench.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    names = ("numpy", "scipy", "torchvision", "timm", "dp-accounting")
    versions = {name: [*metadata.distributions(name=name)] for name in names}
    installed = {name: own[0].version for name, own in versions.items() if own}
    return {"code": digest.hexdigest()[:16], **installed}


def require_same_software(info: NodeInfo) -> None:
    """Raise a `UserError` if a node computes with other software than this process."""
    for name in software() | info.software:
        if (there := info.software.get(name)) != (here := software().get(name)):
            remedy = "the same checkout and packages everywhere, or transport.other_software=true"
            raise UserError(f"{info.process} has {name} {there}, the server {here}", remedy)


class NodeRegistry:
    """The nodes that have said which clients they have.

    Args:
        clients: K.
        tasks: T.
        check: raises a `UserError` for a node that does not fit the run.
    """

    def __init__(self, clients: int, tasks: int, check: Callable[[NodeInfo], None]) -> None:
        self._check = check
        #: Node -> what it says of itself; client -> its node.
        self._infos: dict[str, NodeInfo] = {}
        self._node_of: dict[int, str] = {}
        self.samples, self.labelled = np.zeros((2, tasks, clients), dtype=np.int64)
        #: Per client, the hash of its node's data.
        self.data: dict[int, str] = {}

    def register(self, node: str, info: NodeInfo) -> None:
        """Enter a node. If a client was on another node, it has moved, and that node is gone.

        Raises:
            UserError: the node is no part of this run.
        """
        tasks, clients = self.samples.shape
        if not all(0 <= client < clients for client in info.clients):
            raise UserError(f"{info.process} is of no use to clients={clients}", f"clients 0 to {clients - 1}")
        rows = [*info.samples, *info.labelled]
        if len(rows) != 2 * tasks or {len(row) for row in rows} != {len(info.clients)} or len(set(info.clients)) == 0:
            raise BadMessage(f"{info.process} counts other samples than those of its clients and {tasks} tasks")
        if max(map(max, rows)) > MOST_SAMPLES or (np.array(info.labelled) > np.array(info.samples)).any():
            raise BadMessage(f"{info.process} counts more samples than there can be")
        self._check(info)
        if any(self.data.get(client, info.data) != info.data for client in info.clients):
            raise UserError(f"{info.process} has other data than before", "the data as they were, in one node")
        for client in info.clients:
            if (former := self._node_of.get(client, node)) != node:
                log.info("%s has come back as another one", self._infos[former].process)
                self.remove(former)
        self.samples[:, info.clients], self.labelled[:, info.clients] = info.samples, info.labelled
        self.data |= dict.fromkeys(info.clients, info.data)
        self._infos[node] = info
        self._node_of |= dict.fromkeys(info.clients, node)

    def remove(self, node: str) -> None:
        """Forget a node that is gone, or silent."""
        self._infos.pop(node, None)
        self._node_of = {client: other for client, other in self._node_of.items() if other != node}

    def clear(self) -> None:
        """Forget all nodes, so that each has to say again which clients it has."""
        self._infos, self._node_of = {}, {}

    def __contains__(self, node: str) -> bool:
        return node in self._infos

    @property
    def infos(self) -> list[NodeInfo]:
        """What the nodes say of themselves, in the order of their first clients."""
        return sorted(self._infos.values(), key=lambda info: info.clients)

    @property
    def nodes(self) -> list[str]:
        """The nodes' numbers."""
        return list(self._infos)

    def by_node(self, clients: Iterable[int]) -> dict[str, list[int]]:
        """The nodes of these clients, each with those that it has; clients without a node are left out."""
        found: dict[str, list[int]] = {}
        for client in clients:
            if (node := self._node_of.get(client)) is not None:
                found.setdefault(node, []).append(client)
        return found

    def unassigned(self) -> list[int]:
        """The clients that no node has."""
        return [client for client in range(self.samples.shape[1]) if client not in self._node_of]
