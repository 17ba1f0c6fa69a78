"""Our side: whole rounds as the engine runs them, with messages, codec, admission, ledger and average or solve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.settings import Averaging, Row, Statistics
from benchmarks.peers.work import Work, flat
from fcl_bench.data.splits.base import Stream
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.environment import reuse_freed_memory
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.method import Method
from fcl_bench.training.knobs import Training


def prepared(row: Row, checkout: Path) -> Work:
    """A federation of the row's clients; one sample is tested at the end."""
    reuse_freed_memory()  # as the command does
    if isinstance(row, Averaging):
        federation = federation_of(row, averaging(row), row.pixels)
        network = federation.server.network  # type: ignore[attr-defined]
        return Work(lambda: federation.run(lambda _: None), lambda: flat(network.parameters()))
    assert isinstance(row, Statistics)
    federation = federation_of(row, statistics(row), row.features)
    return Work(lambda: federation.run(lambda _: None), lambda: flat([federation.server.W]))  # type: ignore[attr-defined]


def averaging(row: Averaging) -> FedAvg:
    """FedAvg without augmentation, momentum and decay, which no peer has by default."""
    knobs = Training(
        rounds=row.rounds, epochs=row.epochs, batch_size=row.batch, lr=row.lr, weight_decay=0.0, augment="none"
    )
    return FedAvg(training=knobs)


def statistics(row: Statistics) -> Method:
    """The method of the row, with what else the public code has as its default."""
    if row.method == "afl":
        return AFL(gamma=row.ridge)
    if row.method == "stsa":
        return STSA(M=row.M, gamma=row.ridge)
    return STSAE(M=row.M, gamma=row.ridge, dummy_clients=row.groups)


def federation_of(row: Averaging | Statistics, method: Method, inputs: torch.Tensor) -> Federation:
    """One task of all classes."""
    labels, everyone = row.labels.numpy(), np.arange(len(row.labels))
    task = Task(0, range(row.classes), row.classes)
    stream = Stream((task,), np.arange(row.classes), labels, labels, (everyone,), (everyone[:1],))
    known = np.ones(len(labels), dtype=bool)
    transport = InProcess.of(method, row.context, [row.shards], labels, known, inputs)
    return Federation(method, row.context, stream, transport, inputs[:1])
