"""The network in one half's hands, and the names under which parts of models travel."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from fcl_bench.data.images.batches import Standardise
from fcl_bench.protocol.context import Context
from fcl_bench.randomness import derived_seed
from fcl_bench.tracking.console import Notices
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.trainer import Trainer, rows

if TYPE_CHECKING:
    from fcl_bench.methods.gradient.base import GradientMethod

#: The stage of the rounds in which models travel.
MODEL = "model"
#: The stage in which clients send the moments of their classes, for `ccvr=gaussian` (`ccvr.py`).
MOMENTS = "moments"


def head_seed(context: Context) -> int:
    """The seed of new class weights; both halves draw the same."""
    return derived_seed(context.seed, "heads") % 2**62


def final_prefix(task: int) -> str:
    """Prefix of the names of a task's last model in the stages after training."""
    return f"final.{task}."


def teacher_prefix(task: int) -> str:
    """Prefix of the names of the model with which a task ended, from which clients learn in the next."""
    return f"teacher.{task}."


class ModelHolder:
    """What both halves have: a network, and a trainer that runs it.

    Attributes:
        start: what training starts from.
        network: with the heads so far.
        trainer: runs it.
        prepared: the heads, and the further frozen names, for which `prepare` was called last.
    """

    def __init__(self, method: GradientMethod, context: Context) -> None:
        self.method = method
        self.context = context
        self.start = method.start(context)
        layout = torch.channels_last
        network = method.build_network(context)
        self.network: Network = network.to(context.device, memory_format=layout)  # type: ignore[call-overload]
        self.prepared: tuple[Heads, frozenset[str]] | None = None
        start = self.start
        standardise = Standardise(start.size, start.mean, start.std) if method.trains_network else rows
        self.trainer = Trainer(method.training, standardise, context.device, method.training_key)
        self._notices = Notices(logging.getLogger(type(self).__module__))

    @property
    def scale(self) -> Standardise:
        """Turns images into what the network sees; only of a method that trains on images."""
        standardise = self.trainer.standardise
        assert isinstance(standardise, Standardise)
        return standardise

    def prepare(self, heads: Heads, frozen: Collection[str] = ()) -> None:
        """Give the network its heads so far. Freeze `frozen` and whatever the last head's task does not train."""
        if len(self.network.heads) < len(heads.columns):
            self.method.grow(self.network, heads.sizes, head_seed(self.context))
        task = len(heads.columns) - 1
        self.network.freeze(self.method.frozen(self.network, task, heads.reused) | set(frozen))
        self.prepared = heads, frozenset(frozen)
