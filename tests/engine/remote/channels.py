"""Processes of clients without processes: each is a `Host` that gets and gives bytes, as over a wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fcl_bench.engine.client_state import ClientStore
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.remote.assignment import assign, clients_in
from fcl_bench.engine.remote.host import Host, answered
from fcl_bench.engine.remote.transport import Channel, Gone, Remote


class HostChannel(Channel):
    """A channel whose processes compute an answer when it is asked for.

    Attributes:
        gone: processes that are there no more.
        slow: whether an answer that is due has not come yet, however often one looks.
    """

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self.names = [f"process {number}" for number in range(len(hosts))]
        self.gone: set[int] = set()
        self.slow = False
        self.sent: list[tuple[int, int]] = []
        self._answers: dict[int, list[Iterator[bytes]]] = {number: [] for number in range(len(hosts))}

    def send(self, process: int, request: bytes) -> None:
        if process in self.gone:
            raise Gone("its cable was cut")
        self.sent.append((process, len(request)))
        self._answers[process].append(answered(request, self.hosts[process].answers))

    def ready(self, process: int) -> bool:
        return not self.slow

    def receive(self, process: int) -> bytes:
        if process in self.gone:
            raise Gone("its cable was cut")
        while self._answers[process]:
            if (blob := next(self._answers[process][0], None)) is not None:
                return blob
            del self._answers[process][0]
        raise AssertionError(f"process {process} has nothing to answer")


class Remotes:
    """Makes transports of what `InProcess.of` takes: the first process is the server's own if `local`."""

    def __init__(self, folder: Path, processes: int = 2, local: bool = True, spoilt: bool = True) -> None:
        self.folder, self.processes, self.local, self.spoilt = folder, processes, local, spoilt
        self.channel: HostChannel | None = None

    def __call__(self, method, context, holdings, columns, labelled, inputs, middleware=()) -> Remote:
        clients = Clients(method, context, holdings, columns, labelled, middleware, run="a run")
        hosts, assignment = [], assign(clients, self.processes)
        for process in range(self.processes):
            own = clients_in(assignment, process)
            rows = torch.from_numpy(clients.rows(own))
            theirs = torch.full_like(inputs, torch.nan if inputs.is_floating_point() else 255)
            theirs[rows] = inputs[rows]
            store = ClientStore(self.folder, clients.run, f"process-{process}")
            hosts.append(Host(f"process {process}", clients, own, theirs[rows], store))
        self.channel = HostChannel(hosts)
        if self.local:
            assignment = [process or -1 for process in assignment]
        return Remote(clients, self.channel, assignment, hosts[0] if self.local else None)
