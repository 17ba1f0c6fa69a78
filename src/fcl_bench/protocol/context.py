"""What both halves of a method know (problem, wire, task), and what they get: samples to learn and to classify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from fcl_bench import config

if TYPE_CHECKING:
    from fcl_bench.backbones.backbone import Trainable
    from fcl_bench.options.noise.mechanism import DPMechanism

#: The tensors that one client keeps between its turns, by name. The part of a name before its first dot is its kind
#: ("images.3", "model.body.weight"): run.json reports the bytes of each kind (`client_storage_bytes`).
State = dict[str, torch.Tensor]
#: The kinds whose rows each describe a single sample: a client that keeps these keeps raw data.
SAMPLE_KINDS = ("images", "features", "inputs")


#: `wire.dtype`: the types in which uploads may travel.
WIRE_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in config.WIRE_DTYPES}
#: Types whose range is so small that matrices travel with scales.
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class WireFormat:
    """How messages travel. All settings but `dtype` and `factors` are lossless in float64 and float32.

    Attributes:
        dtype: type of uploaded floating-point tensors. (Broadcasts travel in the types they have.)
        factors: how matrices of unit columns travel: "dtype" sends them in `dtype`; "int8" sends each column in units
            of its largest entry / 127, without that unit, because the receiver restores the length 1.
        gram: "full" sends symmetric matrices whole; "packed" sends their upper triangle, about half the bytes.
        columns: "task" sends per-class matrices with a column for every class of the task; "held" only the columns
            that are not zero (those of the classes that the client holds), and their numbers, 4 bytes each.
        projection: "seed" broadcasts the random projection as 8 bytes; "matrix" as d x M numbers in float64.
    """

    dtype: torch.dtype
    gram: str = "full"
    columns: str = "task"
    projection: str = "seed"
    factors: str = "dtype"

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def factor_bytes(rows: int, wire: WireFormat) -> int:
    """Bytes on the wire of one column of a matrix of unit vectors with `rows` rows."""
    return rows if wire.factors == "int8" else column_bytes(rows, wire.dtype)


def column_bytes(rows: int | None, dtype: torch.dtype) -> int:
    """Bytes on the wire of one column of a matrix with `rows` rows, or (None) of one entry of a vector.

    In a 16-bit type each column comes with a float32 scale, and a vector stays in float32 (see `engine.codec`).
    """
    half = dtype in HALF
    if rows is None:
        return 4 if half else dtype.itemsize
    return rows * dtype.itemsize + (4 if half else 0)


@dataclass(frozen=True)
class Context:
    """What both halves know before the stream starts.

    Attributes:
        inputs: d, the number of features of a sample.
        seed: the run's seed, for generators derived from it.
        dtype: the type in which statistics are accumulated and solved.
        device: the device on which they are.
        wire: how messages travel.
        network: what a method that trains the backbone starts from; None for the methods that take its features.
        clients: K; None if it is not known.
        recurring: whether classes of a task may come back in later ones.
        release: how clients clip their samples and add noise to their statistics; None: they do not.
        sums: whether the server gets the sum of a round's uploads in place of the uploads: clients then send only
            fields that are SUM, MEAN or OPEN, and the server absorbs one message, which has the number of
            uploads in it.
        threads: of the CPU, with which both halves compute; None: as many as the process has.
        cudnn: how it chooses its algorithms on a GPU: deterministic, autotuned.
        classes: C, the classes of the whole stream; None: none comes back, so that they are those of all tasks.
    """

    inputs: int
    seed: int
    dtype: torch.dtype
    device: torch.device
    wire: WireFormat
    network: Trainable | None = None
    clients: int | None = None
    recurring: bool = False
    release: DPMechanism | None = None
    sums: bool = False
    threads: int | None = None
    cudnn: str = "deterministic"
    classes: int | None = None

    def all_classes(self, classes_per_task: Sequence[int]) -> int:
        """C, given c_t with the classes that come back."""
        return sum(classes_per_task) if self.classes is None else self.classes


@dataclass(frozen=True)
class Task:
    """Task t of the stream.

    Attributes:
        index: t, from 0.
        new_columns: the columns of the label matrix that classes which are new in this task take (columns are in order
            of first appearance in the stream).
        columns_seen: C_t, the number of classes seen up to and including this task.
        columns: the columns of all classes that have training samples in the task, ascending; by default the new ones.
        classes: the data set's own numbers of the classes in `new_columns`; by default the columns.
    """

    index: int
    new_columns: range
    columns_seen: int
    columns: tuple[int, ...] = ()
    classes: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", tuple(self.new_columns))
        if not self.classes:
            object.__setattr__(self, "classes", tuple(self.new_columns))


@dataclass(frozen=True)
class ClientData:
    """One client's samples of one task.

    Attributes:
        client: k, from 0.
        task: t, from 0.
        inputs: the labelled samples on the device: features (n, d) in the statistics' dtype, or, for methods that
            train the network, images (n, 3, h, w) in uint8.
        labels: (n,) int64, their classes as columns of the label matrix.
        unlabelled: (m, ...) like `inputs`, the samples without a label (none at `label_rate` 1).
    """

    client: int
    task: int
    inputs: torch.Tensor
    labels: torch.Tensor
    unlabelled: torch.Tensor

    def with_pseudo_labels(self, labels: torch.Tensor) -> ClientData:
        """The shard with these labels (m,) on its unlabelled samples; those whose entry is -1 get none."""
        accepted = labels >= 0
        inputs = torch.cat([self.inputs, self.unlabelled[accepted]])
        known = torch.cat([self.labels, labels[accepted]])
        return replace(self, inputs=inputs, labels=known, unlabelled=self.unlabelled[~accepted])


@dataclass
class TestBatch:
    """Test samples to be classified.

    Attributes:
        load: returns the samples in the form of `ClientData.inputs`; called when `inputs` is first read.
        one_task: whether they are known to be of one task.
        number: the number of a batch that comes back after every task with the same samples, so that a server may keep
            what it computed from them; None for a batch that comes once.
    """

    __test__ = False  # no test case for pytest

    load: Callable[[], torch.Tensor]
    one_task: bool = False
    number: int | None = None

    @cached_property
    def inputs(self) -> torch.Tensor:
        """(n, ...) the samples on the device."""
        return self.load()

    @classmethod
    def of(cls, inputs: torch.Tensor, one_task: bool = False) -> TestBatch:
        """A batch of samples that are already loaded."""
        return cls(lambda: inputs, one_task)


@dataclass(frozen=True)
class Prediction:
    """The server's prediction for n samples.

    Attributes:
        scores: (n, C_t) over the classes seen so far.
        tasks: (n,) int64, the task whose classes alone compete; None: all classes compete.
        heads: per task, (n, c) scores of the task's classes, ascending, by a head of its own; None: those in `scores`.
    """

    scores: torch.Tensor
    tasks: torch.Tensor | None = None
    heads: tuple[torch.Tensor, ...] | None = None
