"""Everything about a run that is settled before any work is done or any file is written."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import yaml

from fcl_bench import environment
from fcl_bench.backbones.backbone import Extractor, Trainable
from fcl_bench.composition import config_dir
from fcl_bench.config import GROUPS, YAML_LOADER, Settings, target_class
from fcl_bench.data.partitions.base import Holdings, draw_labelled
from fcl_bench.data.sources.base import Dataset, loaded
from fcl_bench.data.splits.base import Stream
from fcl_bench.engine.transport import OPEN_ROUNDS
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import run_id
from fcl_bench.files import file_checksum, json_hash, slug, user_path
from fcl_bench.options.none import NoOption
from fcl_bench.protocol.context import WIRE_DTYPES, Context, WireFormat
from fcl_bench.randomness import generator
from fcl_bench.training.knobs import cpu_precision

if TYPE_CHECKING:
    from fcl_bench.execution.adapt import FirstStage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dealt:
    """The data of a run, and the clients' holdings.

    Attributes:
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
        extractor: the frozen backbone; None where a network is trained, by the method or before it.
        context: what both halves of the method know, the device included.
        identity: everything that determines the features, or the network that training starts from.
        fingerprint: hash of the data, those at the clients' sites included.
        checkpoint: hash of the file with those weights that the seed does not draw; None where it draws all or none.
    """

    settings: Settings
    dealt: Dealt
    extractor: Extractor | None
    context: Context
    identity: dict[str, str]
    id: str
    fingerprint: str
    checkpoint: str | None

    @property
    def classes_per_task(self) -> list[int]:
        """c_t, classes that come back included."""
        return [len(task.columns) for task in self.dealt.stream.tasks]

    @property
    def prepares(self) -> bool:
        """Whether a network computes before the method does, with as many threads as the process has."""
        extracts = self.extractor is not None and self.extractor.batch is not None
        return extracts or self.settings.adapt.trains_network

    @property
    def label(self) -> str:
        """Name of the run's folder."""
        settings = self.settings
        return "-".join(map(slug, (settings.method.name, settings.data.name, settings.backbone.name, self.id)))


def make_plan(settings: Settings, sites: str = "") -> Plan:
    """Make the plan of a run. Raises a `UserError` for whatever can't work.

    Args:
        sites: hash of the data at the clients' sites, of a data set that is elsewhere; "": not known yet.
    """
    scalars = settings.scalars
    _require_own_names(settings)
    device = environment.choose_device(scalars.device)
    if getattr(settings.backbone, "compile", False):
        from fcl_bench.backbones.network_extractor import require_compiler

        require_compiler(device)
    precision = getattr(settings.backbone, "precision", "auto")
    if settings.method.trains_network and (settings.adapt.trains_network or precision != "auto"):
        key = f"adapt={settings.adapt.name}" if settings.adapt.trains_network else f"backbone.precision={precision}"
        raise UserError(
            f"{key}: method={settings.method.name} trains the network itself in every task",
            "adapt=none backbone.precision=auto, or a method on frozen features such as method=stsa",
        )
    dealt = deal(settings)
    dataset = dealt.dataset
    if dataset.elsewhere and not settings.transport.reaches_sites:
        raise UserError(
            f"data={dataset.name} stays at the clients' sites, and transport={settings.transport.name} has none",
            "transport=flower, or data=features for one file with everything",
        )
    extractor = network = None
    if settings.method.trains_network or settings.adapt.trains_network:
        network = settings.backbone.trainable(dataset, scalars.seed)
        inputs, features = network.dimension, network.identity
    else:
        with environment.choosing_kernels(scalars.cudnn):
            extractor = settings.backbone.open(dataset, device, scalars.seed)
        inputs, features = extractor.dimension(dataset.train), extractor.identity
    context = context_of(settings, inputs, device, dealt.stream.recurring, network)
    _check_noise(settings, context)
    samples = None if dataset.elsewhere else sum(map(len, dealt.stream.train))
    release, threads = settings.noise.release(settings.method, context), threads_of(settings, context, samples)
    first, last = dealt.stream.tasks[0], dealt.stream.tasks[-1]
    context = dataclasses.replace(context, release=release, threads=threads, classes=last.columns_seen)
    _check_share(settings, context)
    fingerprint = json_hash([dataset.fingerprint, sites]) if dataset.elsewhere else dataset.fingerprint
    data = {"data_fingerprint": fingerprint, "device": environment.device_kind(device)}
    data |= cpu_precision(device, settings.method, settings.adapt)
    identity = run_id({**settings.identity(), **data, "features": features})
    checkpoint = _checkpoint_hash(settings.backbone)
    plan = Plan(settings, dealt, extractor, context, features, identity, fingerprint, checkpoint)
    settings.faults.check(scalars.clients, scalars.tasks)
    settings.secure.check(settings.method, context, scalars.clients, scalars.drops)
    if scalars.robust_groups or scalars.client_share < 1:
        from fcl_bench.options import robust

        robust.require_sums(settings, context)
    if settings.transport.withdrawal:
        from fcl_bench.options import withdrawal

        withdrawal.require_sums(settings.method, context, first)
        if settings.faults.fails:
            raise UserError("transport.withdrawal=true with clients that fail on purpose", "faults=none")
    if settings.transport.rounds == OPEN_ROUNDS:
        from fcl_bench.options import open_rounds

        open_rounds.check(settings, context, first)
    transport, audited = settings.transport, bool(settings.method.audits(context))
    if (settings.faults.fails or scalars.drops or transport.minimum is not None) and audited:
        key = f"faults={settings.faults.name}" if settings.faults.fails else f"on_bad_upload={scalars.on_bad_upload}"
        key = key if settings.faults.fails or scalars.drops else f"transport.minimum={transport.minimum:g}"
        raise UserError(
            f"{key}: the bounds compare with all samples, of which some never come",
            "faults=none on_bad_upload=fail, or method.bounds=false and method.theory=0",
        )
    if not transport.sees_everything and (scalars.drift or audited):
        raise UserError(
            f"transport={transport.name}: audits need all clients' data in one process",
            "drift=0, method.bounds=false and method.theory=0, or transport=in_process",
        )
    parallel = scalars.parallel_clients
    if parallel != "1" and not transport.sees_everything:
        raise UserError(
            f"parallel_clients={parallel}: clients train side by side in one process, and transport={transport.name}"
            " has several",
            "parallel_clients=1, or transport=in_process",
        )
    if settings.method.common_tasks and not dealt.stream.in_step:
        raise UserError(
            f"method={settings.method.name} needs tasks that all clients learn at the same time,"
            f" and split={settings.split.name} gives them none",
            "a method without them such as method=afl or fedavg, or split.order=same split.speed=constant",
        )
    settings.adapt.check(dataclasses.replace(context, classes=first.columns_seen), plan.classes_per_task[:1])
    settings.method.check(context, plan.classes_per_task)
    if settings.transport.fan_in is not None:
        _check_tree(settings, context)
    return plan


def _checkpoint_hash(backbone: Any) -> str | None:
    """Return the hash of a backbone's checkpoint where weights are drawn beside it; else `weights` identifies it."""
    given = getattr(backbone, "checkpoint", None)
    if given is None or not backbone.draws_weights:
        return None
    return file_checksum(user_path("backbone.checkpoint", given))


def _require_own_names(settings: Settings) -> None:
    """Raise a `UserError` for a class with the name of another choice: its runs would have the other's ids."""
    for group in GROUPS:
        choice = getattr(settings, group)
        kind, name = type(choice), choice.name
        path = _target_of(group, name)
        if path is not None and target_class(group, path) is not kind:
            given = any(field.name == "name" for field in dataclasses.fields(choice))
            raise UserError(
                f"{group}._target_={kind.__module__}.{kind.__qualname__} has the name {name} of {path}",
                f"{group}.name=my_{name}" if given else f"a name of its own, such as my_{name}",
            )


@cache
def _target_of(group: str, name: str) -> str | None:
    """The class that our choice of this name is of; None: there is no such choice."""
    file = {file.stem: file for file in (config_dir() / group).glob("*.yaml")}.get(name)
    return None if file is None else yaml.load(file.read_text(), Loader=YAML_LOADER).get("_target_")


def _check_tree(settings: Settings, context: Context) -> None:
    """Raise a `UserError` where uploads cannot be combined on their way."""
    if settings.secure.sums:
        raise UserError(
            f"secure=sums: transport={settings.transport.name} has no way for the exchanges that masks take",
            "transport=in_process, ranks or flower, or secure=none",
        )
    stage = cast("FirstStage", settings.adapt) if settings.adapt.trains_network else None
    if stage is not None and stage.method().combination(context) is None:
        raise UserError(
            f"transport=tree: adapt={settings.adapt.name} has uploads that cannot be combined on their way",
            "transport=in_process, or adapt=fedavg",
        )
    if settings.method.combination(context) is None:
        raise UserError(
            f"transport=tree: method={settings.method.name} with these knobs has uploads that cannot be combined on"
            " their way",
            "transport=in_process, or method=stsa, afl, fedran, centred_sketch, fedlda, fedncm or fedavg",
        )


def context_of(
    settings: Settings, inputs: int, device: torch.device, recurring: bool, network: Trainable | None = None
) -> Context:
    """What both halves of the method know."""
    scalars = settings.scalars
    wire = WireFormat(**{**dataclasses.asdict(scalars.wire), "dtype": WIRE_DTYPES[scalars.wire.dtype]})
    return Context(
        inputs=inputs,
        seed=scalars.seed,
        dtype=getattr(torch, scalars.dtype),
        device=device,
        wire=wire,
        network=network,
        clients=scalars.clients,
        recurring=recurring,
        sums=settings.secure.sums,
        cudnn=scalars.cudnn,
    )


def threads_of(settings: Settings, context: Context, samples: int | None) -> int | None:
    """The threads of the CPU with which both halves of the method compute; None: as many as the process has.

    Args:
        samples: all clients' training samples; None: not known in this process.
    """
    if (wanted := settings.scalars.threads) != "auto":
        return int(wanted)
    on_cpu = context.device.type == "cpu"
    return 1 if on_cpu and samples is not None and settings.method.small(context, samples) else None


def _check_noise(settings: Settings, context: Context) -> None:
    """Raise a `UserError` for what `noise` does not cover."""
    if not settings.noise.noisy:
        return
    if settings.adapt.trains_network:
        raise UserError(
            f"adapt={settings.adapt.name}: the first stage sends models without noise, and noise={settings.noise.name}"
            " would promise what it does not keep",
            "adapt=none",
        )
    settings.noise.check(settings.method, context)


def _check_share(settings: Settings, context: Context) -> None:
    """Raise a `UserError` where shares of the noise would not add up to the noise that is promised of a sum."""
    noise, secure = settings.noise, settings.secure
    if isinstance(noise, NoOption) or not noise.share_of or isinstance(secure, NoOption):
        return
    key = f"noise.share_of={noise.share_of}"
    if settings.transport.reaches_sites:
        raise UserError(
            f"{key} with transport={settings.transport.name}: a site's noise is discrete, and what sums of such shares"
            " promise is not known",
            "noise.share_of=null",
        )
    if settings.faults.fails:
        raise UserError(
            f"faults={settings.faults.name}: with {key} each upload has a part of the noise, which may be missing",
            "faults=none, or noise.share_of=null",
        )
    least = noise.least_deviation(settings.method, context, settings.scalars.tasks)
    if 0 < least < 2 * secure.step:
        raise UserError(
            f"{key}: a client's part of the noise has the standard deviation {least:.2g}, and"
            f" secure.fraction_bits={secure.fraction_bits} rounds it to multiples of {secure.step:.2g}",
            "a larger secure.fraction_bits",
        )


def deal(settings: Settings) -> Dealt:
    """Load the data set, cut it into tasks, deal each task's samples out to the clients, and hide labels."""
    scalars, dataset = settings.scalars, loaded(settings.data)
    if settings.held_out.validation and dataset.elsewhere:
        raise UserError(
            f"data.validation: the training samples of data={dataset.name} stay at the clients' sites",
            "data.validation=0",
        )
    stream, shards = settings.split.deal(dataset, settings.partition, scalars.tasks, scalars.clients, scalars.seed)
    if share := settings.held_out.validation:
        from fcl_bench.data.validation import hold_out

        stream, shards = hold_out(stream, shards, share, scalars.seed, only=not settings.held_out.test)
    return Dealt(dataset, stream, shards, _labelled(settings, stream, shards))


def _labelled(settings: Settings, stream: Stream, shards: list[Holdings]) -> np.ndarray:
    """(n,) bool: which training samples' labels their clients know."""
    rate, seed = settings.scalars.label_rate, settings.scalars.seed
    labelled = np.ones(len(stream.train_columns), dtype=bool)
    if rate == 1:
        return labelled
    for t, clients in enumerate(shards):
        for k, indices in enumerate(clients):
            labelled[indices] = draw_labelled(stream.train_columns[indices], rate, generator(seed, "labels", t, k))
    # Samples that the split leaves out belong to no client.
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
