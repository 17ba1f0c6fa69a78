"""First-stage adaptation (STSA 4.1): the first task trains the network by FedAvg; then it is frozen for good."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fcl_bench.data.splits.stream import Stream
from fcl_bench.engine.checkpoint import Checkpoint
from fcl_bench.engine.federation import Federation
from fcl_bench.engine.ledger import Ledger
from fcl_bench.engine.metrics import pooled_accuracy
from fcl_bench.engine.transport import InProcess
from fcl_bench.files import content_hash, locked
from fcl_bench.methods.gradient.finetune import FineTune
from fcl_bench.protocol.problem import Problem
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network

log = logging.getLogger(__name__)

#: Version of what is stored.
_SCHEMA = 1
#: The ledger's stage of all its exchanges.
STAGE = "adaptation"


@dataclass
class FirstStage(FineTune):
    """FedAvg, whose knobs the user sets at `adapt.training`."""

    training_key: ClassVar[str] = "adapt.training"


@dataclass
class NoAdaptation:
    """The backbone as it comes."""

    name: ClassVar[str] = "none"


@dataclass
class FedAvgAdaptation:
    """FedAvg on the first task. The defaults are STSA's for a ResNet-18 from scratch on CIFAR-100 (E.2).

    Args:
        training: as of a gradient method, for the one task.
    """

    name: ClassVar[str] = "fedavg"

    training: Training = field(
        default_factory=lambda: Training(
            rounds=100, epochs=2, batch_size=128, lr=0.04, momentum=0.9, weight_decay=5e-4, schedule="cosine"
        )
    )

    def __post_init__(self) -> None:
        self.training.check("adapt.training")


@dataclass(frozen=True)
class Adapted:
    """What the first stage left.

    Attributes:
        body: the adapted network without its head, in evaluation mode, on the CPU.
        ledger: its exchanges, all of task 0 and `STAGE`.
        accuracy: of the network with its own head on the first task's test set, percent; None if that is empty.
        seconds: spent on it in this run.
        hit: whether it was there already.
    """

    body: torch.nn.Module
    ledger: Ledger
    accuracy: float | None
    seconds: float
    hit: bool

    def record(self) -> dict[str, Any]:
        """Its part of the run record."""
        communication = self.ledger.communication()
        del communication["by_stage"]
        uploads = self.ledger.uploads
        rounds = 1 + max(row.round for row in uploads)
        return {
            "rounds": rounds,
            "accuracy": self.accuracy,
            **communication,
            "client_seconds": sum(row.client_seconds for row in uploads),
            "server_seconds": sum(self.ledger.server_seconds),
            "seconds": self.seconds,
            "cache_hit": self.hit,
        }


def adapt(
    knobs: FedAvgAdaptation,
    problem: Problem,
    stream: Stream,
    shards: Sequence[Sequence[np.ndarray]],
    labelled: np.ndarray,
    images: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    folder: Path,
    identity: dict[str, Any],
    every: int,
) -> Adapted:
    """Train on the first task, or take over what an earlier run trained; an interrupted training goes on.

    Args:
        knobs: the training.
        problem: with the network to start from.
        stream, shards, labelled: of the whole run; only the first task is looked at.
        images: the data set's training and test images, (n, 3, h, w) uint8; called if there is training to do.
        folder: where results are kept, one folder for each `identity`.
        identity: everything that determines the result.
        every: rounds between checkpoints.
    """
    begin = time.perf_counter()
    digest = content_hash()
    digest.update(json.dumps({"schema": _SCHEMA, **identity}, sort_keys=True, default=str).encode())
    place = folder / f"adapted-{digest.hexdigest()}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{place.name}.lock", "adapting the network"):
        checkpoint = Checkpoint(place, _SCHEMA)
        saved = checkpoint.load()
        hit = saved is not None and saved[0]["tasks_done"] == 1
        none = torch.empty(0, dtype=torch.uint8)
        method = FirstStage(training=knobs.training)
        first = dataclasses.replace(stream, tasks=stream.tasks[:1], train=stream.train[:1], test=stream.test[:1])
        train, test = (none, none) if hit else images()
        transport = InProcess.of(method, problem, shards[:1], stream.train_columns, labelled, train)
        federation = Federation(method, problem, first, transport, test)
        if saved is not None:
            federation.restore(*saved)
            log.info("adaptation: %s", "taken over" if hit else f"going on after round {saved[0]['rounds_done']}")
        state = federation.run(lambda done: checkpoint.save(*done.save()), every)
    ledger = state.ledger
    ledger.rename_stages(STAGE)
    tests = np.array([len(stream.test[0])])
    accuracy = float(pooled_accuracy(state.answers["correct"], tests)[0]) if tests[0] else None
    body = adapted_body(federation.server.state_dict(), problem)
    return Adapted(body, ledger, accuracy, time.perf_counter() - begin, hit)


def adapted_body(state: dict[str, torch.Tensor], problem: Problem) -> torch.nn.Module:
    """The body that a `FineTune` server's state describes, frozen."""
    assert problem.network is not None
    network = Network(problem.network)
    network.load({name: value for name, value in state.items() if name.startswith("body.")})
    return network.body.eval().requires_grad_(False)
