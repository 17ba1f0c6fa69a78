"""Everything about a run that is settled before any work is done or any file is written."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.audits.chosen import against_theory
from fcl_bench.backbones.backbone import Extractor
from fcl_bench.config import Settings
from fcl_bench.data.partitions.holdings import Holdings
from fcl_bench.data.partitions.label_rate import keep_labels
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.splits.stream import Stream
from fcl_bench.errors import UserError
from fcl_bench.files import slug
from fcl_bench.protocol.problem import Problem
from fcl_bench.protocol.wire import WIRE_DTYPES, WireFormat
from fcl_bench.randomness import generator
from fcl_bench.runs.folder import run_id

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dealt:
    """The data of a run, and who holds what.

    Attributes:
        dataset, stream: the data and its tasks.
        shards: per task and client, the indices of its training samples, ascending.
        labelled: (n,) bool, which training samples' labels their clients know.
    """

    dataset: Dataset
    stream: Stream
    shards: list[Holdings]
    labelled: np.ndarray


@dataclass(frozen=True)
class Plan:
    """What will be run.

    Attributes:
        settings: the configuration.
        dealt: the data, and who holds what.
        extractor: the frozen backbone; None where a network is trained, by the method or before it.
        problem: what both halves of the method know, the device included.
        identity: everything that determines the features, or the network that training starts from.
        id: of the run.
    """

    settings: Settings
    dealt: Dealt
    extractor: Extractor | None
    problem: Problem
    identity: dict[str, str]
    id: str

    @property
    def classes_per_task(self) -> list[int]:
        """c_t, classes that come back included."""
        return [len(task.columns) for task in self.dealt.stream.tasks]

    @property
    def label(self) -> str:
        """Name of the run's folder."""
        settings = self.settings
        return "-".join(map(slug, (settings.method.name, settings.data.name, settings.backbone.name, self.id)))


def make_plan(settings: Settings) -> Plan:
    """Settle all of it. Raises a `UserError` for whatever can't work."""
    scalars = settings.scalars
    device = environment.choose_device(scalars.device)
    if settings.method.trains_network and settings.adapt.trains_network:
        raise UserError(
            f"adapt={settings.adapt.name}: method={settings.method.name} trains the network itself in every task",
            "adapt=none, or a method on frozen features such as method=stsa",
        )
    dealt = deal(settings)
    dataset = dealt.dataset
    extractor = network = None
    if settings.method.trains_network or settings.adapt.trains_network:
        network = settings.backbone.trainable(dataset, scalars.seed)
        inputs, features = network.dimension, network.identity
    else:
        extractor = settings.backbone.open(dataset, device, scalars.seed)
        inputs, features = extractor.dimension(dataset.train), extractor.identity
    wire = WireFormat(**{**dataclasses.asdict(scalars.wire), "dtype": WIRE_DTYPES[scalars.wire.dtype]})
    dtype, recurring = getattr(torch, scalars.dtype), dealt.stream.recurring
    sums = settings.secure.sums
    problem = Problem(inputs, scalars.seed, dtype, device, wire, network, scalars.clients, recurring, sums)
    data = {"data_fingerprint": dataset.fingerprint, "device": environment.device_kind(device)}
    identity = run_id({**settings.identity(), **data, "features": features})
    plan = Plan(settings, dealt, extractor, problem, features, identity)
    settings.faults.check(scalars.clients, scalars.tasks)
    settings.secure.check(settings.method, wire, scalars.clients, scalars.drops)
    if (settings.faults.fails or scalars.drops) and against_theory(settings.method, problem) is not None:
        key = f"faults={settings.faults.name}" if settings.faults.fails else f"on_bad_upload={scalars.on_bad_upload}"
        raise UserError(
            f"{key}: the bounds compare with all samples, of which some never come",
            "faults=none on_bad_upload=fail, or method.bounds=false and method.theory=0",
        )
    settings.adapt.check(problem, plan.classes_per_task[:1])
    settings.method.check(problem, plan.classes_per_task)
    return plan


def deal(settings: Settings) -> Dealt:
    """Load the data set, cut it into tasks, deal each task's samples out to the clients, and hide labels."""
    scalars = settings.scalars
    dataset = settings.data.load()
    stream = settings.split.cut(dataset, scalars.tasks, scalars.seed)
    shards = [
        Holdings.of(
            indices[part]
            for part in settings.partition.deal(
                stream.train_columns[indices], scalars.clients, generator(scalars.seed, "partition", t)
            )
        )
        for t, indices in enumerate(stream.train)
    ]
    return Dealt(dataset, stream, shards, _labelled(settings, stream, shards))


def _labelled(settings: Settings, stream: Stream, shards: list[Holdings]) -> np.ndarray:
    """(n,) bool: which training samples' labels their clients know."""
    rate, seed = settings.scalars.label_rate, settings.scalars.seed
    labelled = np.ones(len(stream.train_columns), dtype=bool)
    if rate == 1:
        return labelled
    for t, clients in enumerate(shards):
        for k, indices in enumerate(clients):
            labelled[indices] = keep_labels(stream.train_columns[indices], rate, generator(seed, "labels", t, k))
    # Samples that the split leaves out are nobody's.
    held = np.concatenate([clients.indices for clients in shards])
    known = held[labelled[held]]
    if not len(known):
        raise UserError(
            f"label_rate={rate:g} leaves no label: every client keeps less than half a one of each task",
            "a larger label_rate, or fewer clients or tasks",
        )
    without = len(stream.class_order) - len(np.unique(stream.train_columns[known]))
    if without:
        log.warning("label_rate=%g leaves %d of %d classes without a label", rate, without, len(stream.class_order))
    return labelled
