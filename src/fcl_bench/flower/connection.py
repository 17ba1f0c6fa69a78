"""`transport=flower`: clients at their sites, reached through Flower's SuperLink and SuperNodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.remote.process_info import ProcessInfo, require_alike
from fcl_bench.engine.transport import Transport
from fcl_bench.engine.transports.base import Connection, PartialRounds
from fcl_bench.errors import UserError
from fcl_bench.files import json_hash, user_path
from fcl_bench.flower.line import Line, LinkLost, require_flower
from fcl_bench.flower.node_registry import NodeInfo, NodeRegistry
from fcl_bench.flower.transport import Flower

#: Seconds that a round waits for its replies where nothing else is said.
_DEADLINE = 600.0


class Federated(Connection):
    """The nodes of one run.

    Args:
        line: to the SuperLink, not open yet: a run that is complete needs none.
        deadline: seconds that a round waits for its replies.
    """

    def __init__(self, line: Line, deadline: float) -> None:
        self._line, self._deadline = line, deadline
        self._residents: list[NodeInfo] = []
        self._transport: Flower | None = None

    def federate(self, clients: Clients, inputs: torch.Tensor, keep: Path) -> Transport:
        """See `Connection`. The clients' states stay on the nodes' disks, not in `keep`."""
        if clients.stage != "run":
            raise UserError("adapt=... trains a first stage, which transport=flower does not carry", "adapt=none")
        self._transport = self._reached(clients)
        return self._transport

    def data_of(self, clients: Clients) -> str:
        """See `Connection`: of the nodes' hashes of their data, in the order of the clients."""
        return json_hash(self._reached(clients).data)

    def _reached(self, clients: Clients) -> Flower:
        try:
            if not self._line.is_open:
                self._line.open()
        except LinkLost as lost:
            remedy = (
                "transport.link=HOST:PORT of a flower-superlink that runs on this machine (docs/how-to/federation.md)"
            )
            raise UserError(str(lost), remedy) from lost
        run: dict[str, Any] = {"id": clients.run, "stage": clients.stage, "config": dict(clients.config)}
        here = ProcessInfo.of("the server", clients, [])
        if clients.elsewhere:
            run |= {
                "inputs": clients.context.inputs,
                "recurring": clients.context.recurring,
                "classes": list(map(list, clients.classes)),
            }

        def check(census: ProcessInfo) -> None:
            # Sites have the machines that they have, and there is no run in one process to be identical with.
            if clients.elsewhere:
                census = replace(census, threads=here.threads, preparing=here.preparing, device=here.device)
            require_alike(here, [census])

        homes = NodeRegistry(clients.count, clients.tasks, check)
        transport = Flower(self._line, run, homes, self._deadline, apart=clients.elsewhere)
        self._residents = transport.open()
        return transport

    def about(self) -> dict[str, Any]:
        """See `Connection`."""
        return {"processes": 1 + len(self._residents), "nodes": [resident.about() for resident in self._residents]}

    def complete(self) -> None:
        """The run is over: the nodes forget what its clients kept."""
        if self._transport is not None:
            self._transport.forget()


@dataclass
class OverFlower(PartialRounds):
    """Clients on nodes of a Flower federation.

    Args:
        link: host:port of the SuperLink, which runs on this machine.
        ca: file of the authority that signed the SuperLink's certificate; None: without TLS.
    """

    name: ClassVar[str] = "flower"
    reaches_sites: ClassVar[bool] = True

    link: str = knob(
        "localhost:8000", filled=True, words="host:port of a SuperLink, such as localhost:8000", identity=False
    )
    ca: str | None = knob(None, identity=False)

    @contextmanager
    def connect(self) -> Iterator[Federated]:
        require_flower("transport=flower")
        authority = None if self.ca is None else user_path("transport.ca", self.ca)
        if authority is not None and not authority.is_file():
            raise UserError(f"transport.ca={self.ca} is no file", "the certificate of the authority, in PEM")
        with closing(Line(self.link, authority)) as line:
            yield Federated(line, _DEADLINE if self.deadline is None else self.deadline)
