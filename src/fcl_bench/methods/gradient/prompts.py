"""What the methods of prompts share: a frozen ViT, prompts that grow with the tasks, heads of old tasks that rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch

from fcl_bench.config import knob
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.problem import Problem, Shard, State
from fcl_bench.randomness import derived_seed
from fcl_bench.training.heads import Heads
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network
from fcl_bench.training.objective import Objective
from fcl_bench.training.vit.blocks import dimension_of, require_layers, transformer_blocks
from fcl_bench.training.vit.prompts import PromptedViT, Prompts


def prompted(network: Network) -> PromptedViT:
    """The body of a prompt method's network."""
    return cast(PromptedViT, network.body)


class PromptObjective(Objective):
    """Cross-entropy, and what the choice of prompts adds to it."""

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(network, inputs, labels) + prompted(network).penalty


class PromptClient(GradientClient):
    """Trains the task's prompts and head."""

    def objective(self, shard: Shard, broadcast: Message, state: State) -> Objective:
        return PromptObjective(Heads.from_message(broadcast), self.method.loss_over, self.method.frozen_heads)


@dataclass
class PromptMethod(GradientMethod):
    """A method that trains prompts inside a frozen ViT, and class weights.

    FedAvg of the prompts, keys and class weights that train; nothing else ever travels. Clients keep nothing.

    Args:
        training: as of every gradient method.
        loss_over: whose scores compete in the loss; here by default the task's own.
        frozen_heads: whether the class weights of old tasks stay as they are; here they do.
    """

    client_half = PromptClient
    inside_transformers: ClassVar[bool] = True

    training: Training = field(default_factory=lambda: Training(optimizer="adam", lr=1e-3, weight_decay=0.0))
    loss_over: str = knob("task", choices=("seen", "task"))
    frozen_heads: bool = True

    #: What `method=` calls it.
    name: ClassVar[str]

    @abstractmethod
    def prompts(self, dimension: int) -> Prompts:
        """The prompts before the first task, for tokens of `dimension` numbers."""

    @property
    @abstractmethod
    def prompted_layers(self) -> dict[str, list[int]]:
        """The layers that take prompts, by the key that sets them, for messages."""

    def check(self, problem: Problem, classes_per_task: list[int]) -> None:
        super().check(problem, classes_per_task)
        start = self.start(problem)
        blocks = transformer_blocks(start.build(), self.name, start.name)
        for key, layers in self.prompted_layers.items():
            require_layers(key, layers, len(blocks))

    def build_network(self, problem: Problem) -> Network:
        network = super().build_network(problem)
        [first, *_] = transformer_blocks(network.body, self.name, self.start(problem).name)
        network.put_body(PromptedViT(network.body, self.prompts(dimension_of(first))))
        return network

    def grow(self, network: Network, sizes: list[int], seed: int) -> None:
        prompts = prompted(network).prompts
        while prompts.tasks < len(sizes):
            prompts.grow(derived_seed(seed, "prompts", prompts.tasks) % 2**62)
        super().grow(network, sizes, seed)

    def frozen(
        self, network: Network, stages: tuple[str, ...], task: int, reused: Container[int] = frozenset()
    ) -> set[str]:
        old = {f"body.prompts.{name}" for name in prompted(network).prompts.old()}
        return super().frozen(network, stages, task, reused) | old
