"""`transport=flower`: clients at their sites, reached through Flower's SuperLink and SuperNodes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.engine.remote.process_info import ProcessInfo, require_alike
from fcl_bench.engine.transport import OPEN_ROUNDS, SYNCHRONOUS, Clients, Connection, PartialRounds, Transport
from fcl_bench.errors import UserError
from fcl_bench.files import user_path
from fcl_bench.flower.node_registry import NodeInfo, NodeRegistry, require_same_software
from fcl_bench.flower.relay import Relay, SuperLinkLost, require_flower
from fcl_bench.flower.transport import FlowerTransport
from fcl_bench.results.signing import read_key

#: Seconds that a round waits for its replies where nothing else is said.
_DEADLINE = 600.0


class NodesConnection(Connection):
    """The nodes of one run.

    Args:
        relay: to the SuperLink, not open yet: a run that is complete needs none.
    """

    def __init__(self, relay: Relay, choice: OverFlower) -> None:
        self._relay, self._choice = relay, choice
        self._infos: list[NodeInfo] = []
        self._transport: FlowerTransport | None = None

    def federate(self, clients: Clients, inputs: torch.Tensor, states: Path) -> Transport:
        # The clients' states stay on the nodes' disks, not in `states`.
        if clients.stage != "run":
            raise UserError("adapt=... trains a first stage, which transport=flower does not carry", "adapt=none")
        self._transport = self._opened(clients)
        return self._transport

    def data_of(self, clients: Clients) -> str:
        return self._opened(clients).data

    def _opened(self, clients: Clients) -> FlowerTransport:
        try:
            if not self._relay.is_open:
                self._relay.open()
        except SuperLinkLost as lost:
            remedy = (
                "transport.link=HOST:PORT of a flower-superlink that runs on this machine (docs/how-to/federation.md)"
            )
            raise UserError(str(lost), remedy) from lost
        run: dict[str, Any] = {"id": clients.run, "stage": clients.stage, "config": without_paths(clients)}
        here = ProcessInfo.here("the server", clients.run, clients.context, clients.prepared)
        if clients.elsewhere:
            run |= {
                "inputs": clients.context.inputs,
                "recurring": clients.context.recurring,
                "classes": list(map(list, clients.classes)),
            }

        def check(info: NodeInfo) -> None:
            # Sites have the machines that they have, and there is no run in one process to be identical with.
            if not self._choice.other_software:
                require_same_software(info)
            if clients.elsewhere:
                info = replace(info, threads=here.threads, preparing=here.preparing, device=here.device)
            require_alike(here, [info])

        registry = NodeRegistry(clients.count, clients.tasks, check)
        transport = FlowerTransport(self._relay, run, registry, self._choice.deadline or _DEADLINE)
        if self._choice.withdrawal:
            transport.withdrawal = {"absorbed": {}, "withdrawn": [], "config": clients.config}
        self._infos = transport.open()
        return transport

    def about(self) -> dict[str, Any]:
        withdrawal = self._transport.withdrawal if self._transport else None
        withdrawn = {"withdrawn": withdrawal["withdrawn"]} if withdrawal else {}
        return {"processes": 1 + len(self._infos), "nodes": [info.record_entry() for info in self._infos], **withdrawn}

    def complete(self) -> None:
        if self._transport is not None:
            self._transport.delete_states()


def without_paths(clients: Clients) -> dict[str, Any]:
    """The configuration for the nodes: without where this process writes, and, of sites, where its data are."""
    config = copy.deepcopy(dict(clients.config))
    config["out"] = "outputs"
    config["cache"]["dir"] = "cache"
    config["transport"] |= {"link": "localhost:8000", "ca": None, "key": None}
    if clients.elsewhere:
        config["data"]["path"] = "data.path"
    return config


@dataclass
class OverFlower(PartialRounds):
    """Clients on nodes of a Flower federation.

    Args:
        link: host:port of the SuperLink, which runs on this machine.
        ca: file of the authority that signed the SuperLink's certificate; None: without TLS.
        key: file of the private key with which requests are signed; None: they are not.
        other_software: whether nodes may run other code, or other versions of packages, than the server.
        withdrawal: whether clients can be taken out of the model again.
        rounds: `SYNCHRONOUS` or `OPEN_ROUNDS`.
        every: after so many uploads of open rounds the state and the current model are saved.
    """

    name: ClassVar[str] = "flower"
    reaches_sites: ClassVar[bool] = True

    link: str = knob(
        "localhost:8000", filled=True, words="host:port of a SuperLink, such as localhost:8000", identity=False
    )
    ca: str | None = knob(None, identity=False)
    key: str | None = knob(None, identity=False)
    other_software: bool = knob(False, identity=False)
    withdrawal: bool = knob(False, identity=False)  # type: ignore[misc]
    rounds: str = knob(SYNCHRONOUS, choices=(SYNCHRONOUS, OPEN_ROUNDS), neutral=SYNCHRONOUS)  # type: ignore[misc]
    every: int | None = knob(None, least=1, of=f"rounds={OPEN_ROUNDS}", identity=False)  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.rounds == OPEN_ROUNDS and self.minimum is not None:
            what = f"transport.rounds={OPEN_ROUNDS} goes on without no client, and needs no transport.minimum"
            raise UserError(what, "transport.minimum=null")

    def identity(self) -> dict[str, Any]:
        # Uploads come as they do, so that tests before the last upload differ from a simulation's.
        opened = {"rounds": OPEN_ROUNDS, "order": "as they come"} if self.rounds == OPEN_ROUNDS else {}
        return {**super().identity(), **opened}

    @contextmanager
    def connect(self) -> Iterator[NodesConnection]:
        require_flower("transport=flower")
        authority = None if self.ca is None else user_path("transport.ca", self.ca)
        if authority is not None and not authority.is_file():
            raise UserError(f"transport.ca={self.ca} is no file", "the certificate of the authority, in PEM")
        key = None if self.key is None else read_key("transport.key", self.key, "private")
        with closing(Relay(self.link, authority, key)) as relay:
            yield NodesConnection(relay, self)
