"""The inputs of a method's two halves: the problem before the stream starts, and a client's samples of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from fcl_bench.protocol.dp_mechanism import DPMechanism
from fcl_bench.protocol.wire import WireFormat

if TYPE_CHECKING:
    from fcl_bench.backbones.backbone import Trainable

#: The tensors that one client keeps between its turns, by name. The part of a name before its first dot is its kind
#: ("images.3", "model.body.weight"): run.json reports the bytes of each kind (`client_storage_bytes`).
State = dict[str, torch.Tensor]
#: The kinds whose rows each describe a single sample: a client that keeps these keeps raw data.
SAMPLE_KINDS = ("images", "features", "inputs")


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
            fields that can be summed (`Message.summed`), and the server absorbs one message, which has the number of
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
        return ClientData(
            self.client,
            self.task,
            torch.cat([self.inputs, self.unlabelled[accepted]]),
            torch.cat([self.labels, labels[accepted]]),
            self.unlabelled[~accepted],
        )


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
