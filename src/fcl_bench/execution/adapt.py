"""First-stage adaptation (STSA 4.1): the network is trained on the first task, e.g. by FedAvg, then stays frozen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol, cast

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.backbones.backbone import Backbone, Trainable
from fcl_bench.backbones.network_extractor import NetworkExtractor
from fcl_bench.engine.checkpoint import Checkpoint
from fcl_bench.engine.in_process import Here
from fcl_bench.engine.ledger import Ledger
from fcl_bench.engine.loop import CLIENT, Federation
from fcl_bench.engine.metrics import metrics
from fcl_bench.engine.reports import Exchanged
from fcl_bench.engine.transport import Clients, Connection
from fcl_bench.execution.folder import identity_hash
from fcl_bench.execution.options import exchange_steps
from fcl_bench.execution.plan import Plan
from fcl_bench.execution.run_json import Adaptation
from fcl_bench.files import locked
from fcl_bench.options.none import NoOption
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.method import Method, Server
from fcl_bench.training.knobs import cpu_precision

log = logging.getLogger(__name__)

#: Version of what is stored.
_SCHEMA = 2
#: What determines the first stage, of the whole run's identity; that has a transport only where it changes results.
_IDENTITY = (
    *("seed", "beta", "clients", "tasks", "label_rate", "dtype", "data", "split", "partition"),
    *("on_bad_upload", "cudnn", "transport", "held_out"),
)
#: The ledger's stage of all its exchanges.
STAGE = "adaptation"


class FirstStage(Protocol):
    """A choice of `adapt=...` other than `none`."""

    name: ClassVar[str]
    trains_network: ClassVar[bool]

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        """Raise a `UserError` for knobs that this problem rules out, before any work is done."""

    def method(self) -> Method:
        """What trains the first task."""

    def trained(self, server: Server) -> dict[str, torch.Tensor]:
        """The part of the body that training may have changed, given the method's server: `body.<name>` -> tensor."""

    def body(self, context: Context, first: Task, trained: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """The trained network without its head, in evaluation mode, on the CPU."""

    def identity(self) -> dict[str, object]:
        """Everything of it that determines the result."""

    def sends_columns(self) -> bool:
        """Whether uploads have a matrix with a column per class, whose bytes depend on `wire.columns`."""


@dataclass(frozen=True)
class Adapted:
    """The result of the first stage.

    Attributes:
        trained: the part of the body that the first stage may have changed: `body.<name>` -> tensor.
        ledger: its exchanges, all of task 0 and `STAGE`.
        accuracy: of the network with its own head on the first task's test set, percent; None if that is empty.
        seconds: spent on it in this run.
    """

    body: torch.nn.Module
    trained: dict[str, torch.Tensor]
    ledger: Ledger
    accuracy: float | None
    seconds: float
    hit: bool

    def record(self, weights: str | None) -> Adaptation:
        """Its part of the run record, given the hash of the adapted network."""
        sent, seconds = self.ledger.communication(), self.ledger.runtime()
        exchanged = cast(Exchanged, {name: size for name, size in sent.items() if name != "by_stage"})
        return {
            "rounds": 1 + max(row.round for row in self.ledger.uploads),
            "accuracy": self.accuracy,
            **exchanged,
            "client_seconds": seconds["client_seconds"],
            "server_seconds": seconds["server_seconds"],
            "seconds": self.seconds,
            "cache_hit": self.hit,
            "weights": weights,
            "revealed": self.ledger.single_samples(),
        }


def adaptation_identity(plan: Plan) -> dict[str, object]:
    """Everything that determines the first stage; the method, and settings that only the method uses, are left out."""
    whole = plan.settings.identity()
    wire = plan.context.wire
    # Only where it changes bytes, so that runs which differ in nothing else share a stage.
    columns = {"wire_columns": wire.columns} if wire.columns != "task" and _stage(plan).sends_columns() else {}
    return {
        **{key: whole[key] for key in _IDENTITY if key in whole},
        "wire_dtype": str(wire.dtype),
        **columns,
        **_stage(plan).identity(),
        "network": plan.identity,
        "data_fingerprint": plan.dealt.dataset.fingerprint,
        "device": environment.device_kind(plan.context.device),
        **cpu_precision(plan.context.device, _stage(plan)),
    }


def adapt(
    plan: Plan, images: Callable[[], tuple[torch.Tensor, torch.Tensor]], folder: Path, link: Connection
) -> Adapted:
    """Train on the first task, or reuse an earlier run's training; an interrupted training continues.

    Args:
        plan: the run's plan; only the first task of its data is used.
        images: the data set's training and test images, (n, 3, h, w) uint8; called if there is training to do.
    """
    begin = time.perf_counter()
    identity = identity_hash(_SCHEMA, adaptation_identity(plan))
    place = folder / f"adapted-{identity}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{place.name}.lock", "adapting the network"):
        checkpoint = Checkpoint(place, _SCHEMA, identity)
        saved = checkpoint.load()
        hit = saved is not None and saved[0]["tasks_done"] == 1
        if saved is not None and hit:
            # What its clients kept is of no use any more, and other processes may have it on disks of their own.
            saved = saved[0], {name: tensor for name, tensor in saved[1].items() if not name.startswith(CLIENT)}
        none = torch.empty(0, dtype=torch.uint8)
        stage, dealt = _stage(plan), plan.dealt
        stream = dealt.stream
        context = _context(plan)
        first = replace(stream, tasks=stream.tasks[:1], train=stream.train[:1], test=stream.test[:1])
        train, test = (none, none) if hit else images()
        # A first stage that is already done needs no clients.
        reached = Here() if hit else link
        transport = reached.federate(first_stage_clients(plan), train, place / "clients")
        federation = Federation(
            method=stage.method(),
            context=context,
            stream=first,
            transport=transport,
            test=test,
            drops=plan.settings.scalars.drops,
            minimum=plan.settings.transport.minimum,
            steps=exchange_steps(stage.method(), context, plan.settings),
        )
        if saved is not None:
            checkpoint.tidy()
            federation.restore(*saved)
            log.info("adaptation: %s", "taken over" if hit else f"going on after round {saved[0]['rounds_done']}")
        state = federation.run(lambda done: checkpoint.save(*done.save()), plan.settings.scalars.checkpoint_rounds)
    ledger = state.ledger
    ledger.rename_stages(STAGE)
    accuracy = metrics(state.answers["correct"], np.array([len(first.test[0])]))["accuracy"][0]
    trained = stage.trained(federation.server)
    body = stage.body(plan.context, first.tasks[0], trained)
    return Adapted(body, trained, ledger, accuracy, time.perf_counter() - begin, hit)


def adapted_extractor(
    backbone: Backbone, body: torch.nn.Module, network: Trainable, device: torch.device
) -> NetworkExtractor:
    """The network that a first stage left, frozen, in the precision that the backbone's key says."""
    return NetworkExtractor(body, network, device, getattr(backbone, "precision", "auto"))


def first_stage_clients(plan: Plan) -> Clients:
    """The clients of the first stage: of the first task alone."""
    dealt = plan.dealt
    return Clients(
        method=_stage(plan).method(),
        context=_context(plan),
        holdings=dealt.shards[:1],
        columns=dealt.stream.train_columns,
        labelled=dealt.labelled,
        run=identity_hash(_SCHEMA, adaptation_identity(plan)),
        stage="adapt",
    )


def _stage(plan: Plan) -> FirstStage:
    assert not isinstance(plan.settings.adapt, NoOption)
    return plan.settings.adapt


def _context(plan: Plan) -> Context:
    """The run's, with as many threads as the process has: the run's method may need fewer than training a network.

    Models travel as they are, whatever the method's uploads do.
    """
    return replace(plan.context, threads=None, sums=False)
