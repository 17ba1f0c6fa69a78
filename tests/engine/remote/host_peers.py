"""Processes of clients without processes: each is a `Host` that gets and gives bytes, as over a wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fcl_bench.engine.checkpoint import ClientStore
from fcl_bench.engine.remote.host import Host, answered
from fcl_bench.engine.remote.ranks import assign, clients_in
from fcl_bench.engine.remote.transport import Gone, Peer, Remote
from fcl_bench.engine.transport import Clients


class HostPeer(Peer):
    """A process that computes an answer when it is asked for.

    Attributes:
        gone: whether it is there no more.
        slow: whether an answer that is due has not come yet, however often one looks.
        sent: how many requests it got.
    """

    def __init__(self, name: str, host: Host) -> None:
        super().__init__(name)
        self._host = host
        self.gone = self.slow = False
        self.sent = 0
        self._answers: list[Iterator[bytes]] = []

    def send(self, blob: bytes) -> None:
        if self.gone:
            raise Gone("its cable was cut")
        self.sent += 1
        self._answers.append(answered(blob, self._host.answers))

    def ready(self) -> bool:
        return not self.slow

    def receive(self) -> bytes:
        if self.gone:
            raise Gone("its cable was cut")
        while self._answers:
            if (blob := next(self._answers[0], None)) is not None:
                assert len(blob) <= self.most, "an honest answer is never longer than expected"
                return blob
            del self._answers[0]
        raise AssertionError(f"{self.name} has nothing to answer")


class Remotes:
    """Makes transports of what `InProcess.of` takes: the first process is the server's own."""

    def __init__(self, folder: Path, processes: int = 2) -> None:
        self.folder, self.processes = folder, processes
        self.hosts: list[Host] = []
        self.peers: dict[int, HostPeer] = {}

    def __call__(self, method, context, holdings, columns, labelled, inputs, middleware=()) -> Remote:
        clients = Clients(method, context, holdings, columns, labelled, middleware, run="a run")
        assignment = assign(clients, self.processes)
        self.hosts = []
        for process in range(self.processes):
            own = clients_in(assignment, process)
            rows = torch.from_numpy(clients.rows(own))
            theirs = torch.full_like(inputs, torch.nan if inputs.is_floating_point() else 255)
            theirs[rows] = inputs[rows]
            store = ClientStore(self.folder, clients.run, f"process-{process}")
            self.hosts.append(Host(clients, own, theirs[rows], store))
        self.peers = {number: HostPeer(f"process {number}", host) for number, host in enumerate(self.hosts) if number}
        return Remote(clients, self.peers, assignment, self.hosts[0])
