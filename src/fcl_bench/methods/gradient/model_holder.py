"""The network in one half's hands, and the names under which parts of models travel."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from fcl_bench.data.images.batches import Standardise
from fcl_bench.protocol.context import Problem
from fcl_bench.randomness import derived_seed
from fcl_bench.training.heads import Heads
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import Trainer, rows

if TYPE_CHECKING:
    from fcl_bench.methods.gradient.base import GradientMethod

#: The stage of the rounds in which models travel.
MODEL = "model"


def head_seed(problem: Problem) -> int:
    """The seed of new class weights; both halves draw the same."""
    return derived_seed(problem.seed, "heads") % 2**62


def final_prefix(task: int) -> str:
    """Prefix of the names of a task's last model in the stages after training."""
    return f"final.{task}."


def teacher_prefix(task: int) -> str:
    """Prefix of the names of the model with which a task ended, from which clients learn in the next."""
    return f"teacher.{task}."


class Half:
    """What both halves have: a network, and a trainer that runs it.

    Attributes:
        start: what training starts from.
        network: with the heads so far.
        trainer: runs it.
    """

    def __init__(self, method: GradientMethod, problem: Problem) -> None:
        self.method = method
        self.problem = problem
        self.start = method.start(problem)
        self.network = self.new_network()
        start = self.start
        standardise = Standardise(start.size, start.mean, start.std) if method.trains_network else rows
        self.trainer = Trainer(method.training, standardise, problem.device, method.training_key)

    def new_network(self) -> Network:
        """A new network without heads."""
        layout = torch.channels_last
        return self.method.build_network(self.problem).to(self.problem.device, memory_format=layout)  # type: ignore[call-overload]

    def prepare(self, heads: Heads, resting: Collection[str] = ()) -> None:
        """Give the network its heads so far. Freeze `resting` and whatever the last head's task does not train."""
        if len(self.network.heads) < len(heads.columns):
            self.method.grow(self.network, heads.sizes, head_seed(self.problem))
        task = len(heads.columns) - 1
        self.network.freeze(self.method.frozen(self.network, self.start.stages, task, heads.reused) | set(resting))
