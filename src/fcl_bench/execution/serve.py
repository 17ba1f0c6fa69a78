"""A process that has only clients: it derives them from the settings, and does what the server's process asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch

from fcl_bench.backbones.backbone import Extractor
from fcl_bench.config import Settings
from fcl_bench.engine.checkpoint import ClientStore
from fcl_bench.engine.remote.host import Host
from fcl_bench.engine.remote.process_info import ProcessInfo
from fcl_bench.engine.remote.ranks import first_batches
from fcl_bench.engine.remote.replies import Received, serialise
from fcl_bench.engine.transport import Clients, OwnClients
from fcl_bench.environment import choosing_kernels, reuse_freed_memory
from fcl_bench.execution.adapt import adapted_extractor, first_stage_clients
from fcl_bench.execution.inputs import images_of
from fcl_bench.execution.options import clients_of
from fcl_bench.execution.plan import Plan, make_plan
from fcl_bench.options.none import NoOption
from fcl_bench.protocol.message import Message


class Site:
    """One process of clients of a run."""

    def __init__(self, settings: Settings, name: str, own_clients: OwnClients) -> None:
        self._settings, self._name, self._own_clients = settings, name, own_clients
        self._network: Extractor | None = None
        self._host: Host | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run; it is made when it is asked for, so that whoever asks is told what is wrong."""
        return make_plan(self._settings)

    def answers(self, request: Received) -> Iterator[bytes]:
        """What is answered to a request (see `engine.remote.host.Host.answers`)."""
        if request.kind == "plan":
            own = ProcessInfo.here(self._name, self.plan.id, self.plan.context, self.plan.prepares)
            yield serialise("plan", **asdict(own))
        elif request.kind == "network":
            stage, context = self.plan.settings.adapt, self.plan.context
            assert not isinstance(stage, NoOption)
            assert context.network is not None
            body = stage.body(context, self.plan.dealt.stream.tasks[0], request.message)
            self._network = adapted_extractor(self._settings.backbone, body, context.network, context.device)
            yield serialise("taken")
        elif request.kind == "extract":
            yield serialise("features", Message({"features": self._features(**request.beside)}))
        elif request.kind == "open":
            self._host = self._opened(request.beside["stage"], Path(request.beside["states"]), request.message)
            yield serialise("opened")
        elif self._host is None:
            raise ValueError(f"{request.kind} before the clients are there")
        else:
            yield from self._host.answers(request)

    def _features(self, side: str, start: int, end: int) -> torch.Tensor:
        """The features of samples `start` to `end` of a side, in the batches of a whole pass."""
        extractor = self._network or self.plan.extractor
        assert extractor is not None
        dataset = self.plan.dealt.dataset
        split = dataset.train if side == "train" else dataset.test
        return torch.cat([*first_batches(extractor, split, range(start, end))])

    def _opened(self, stage: str, states: Path, given: Message) -> Host:
        """The clients of one of the run's federations, with the samples that the server gave, or images from here."""
        clients: Clients = clients_of(self.plan) if stage == "run" else first_stage_clients(self.plan)
        self._host = None  # before the next one's samples come
        own = list(self._own_clients(clients))
        if "inputs" in given:
            inputs = given["inputs"]
        else:
            inputs = images_of(self.plan, self.plan.dealt.dataset.train)[torch.from_numpy(clients.rows(own))]
        return Host(clients, own, inputs, ClientStore(states, clients.run, self._name.replace(" ", "-")))


def serve(settings: Settings) -> None:
    """Do the clients' part of the run that `settings` describe, until the server's process says that it is over."""
    reuse_freed_memory()
    transport = settings.transport
    with choosing_kernels(settings.scalars.cudnn):
        transport.follow(lambda process, own_clients: Site(settings, process, own_clients).answers)
