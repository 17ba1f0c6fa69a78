"""What prompt methods share: a frozen ViT, prompts that grow with the tasks, and frozen heads of old tasks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augmentation, Samples
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.methods.transformers.vit.prompts import PromptedViT, Prompts
from fcl_bench.protocol.context import ClientData, Context, Prediction, State, TestBatch
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective
from fcl_bench.training.transformer_blocks import dimension_of, require_layers, transformer_blocks


def prompted(network: Network) -> PromptedViT:
    """The body of a prompt method's network."""
    return cast(PromptedViT, network.body)


def require_even(key: str, length: int) -> None:
    """Raise a `UserError` for a prompt with an odd number of rows, which cannot be half keys and half values."""
    if length % 2:
        raise UserError(
            f"{key}={length} is odd: half of a prompt's rows are keys, half are values", f"{key}={length + 1}"
        )


class PromptObjective(Objective):
    """Cross-entropy, plus the penalty of the prompts."""

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(network, inputs, labels) + prompted(network).penalty

    def finish(self, network: Network) -> None:
        # It holds autograd's graph of the last step, with which the network could not be copied.
        prompted(network).prompts.penalty = torch.zeros(())


class KnownQueries(Samples):
    """A client's own samples with known queries, which the body then need not compute.

    Args:
        own: the samples, which are not augmented.
        queries: (n, d) their queries.
        body: the network that gets the queries of each batch.
    """

    def __init__(self, own: Samples, queries: torch.Tensor, body: PromptedViT) -> None:
        super().__init__(own.inputs, own.labels)
        self._queries, self._body = queries, body

    def batch(
        self, chosen: torch.Tensor, augment: Augmentation, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._body.expect(self._queries[chosen])
        return super().batch(chosen, augment, generator)


class PromptClient(GradientClient):
    """Trains the task's prompts and head.

    Without augmentation an image's query is the same in all epochs and rounds of a task. The queries of all the
    client's samples are then computed once, and kept until the next task: n d floats.
    """

    method: PromptMethod

    def __init__(self, method: PromptMethod, context: Context) -> None:
        super().__init__(method, context)
        self._queries: dict[int, torch.Tensor] = {}
        self._task = 0

    def samples(self, client_data: ClientData, broadcast: Message, state: State) -> Samples:
        own = super().samples(client_data, broadcast, state)
        if self.method.training.augment != "none" or not len(own):
            return own
        return KnownQueries(own, self.queries(client_data), prompted(self.network))

    def queries(self, client_data: ClientData) -> torch.Tensor:
        """(n, d) the queries of the shard's labelled samples."""
        if self._task != client_data.task:
            self._queries, self._task = {}, client_data.task
        found = self._queries.get(client_data.client)
        if found is None:
            # Autograd refuses tensors that were made in inference mode, so a copy is taken.
            made = self.trainer.features(self.network, client_data.inputs, of=prompted(self.network).queries)
            found = self._queries[client_data.client] = made.clone()
        return found

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        return PromptObjective(Heads.from_message(broadcast), self.method.loss_over, self.method.frozen_heads)


class PromptServer(GradientServer):
    """Averages prompts and heads. It keeps the queries (n, d) of test batches that come back."""

    def __init__(self, method: PromptMethod, context: Context) -> None:
        super().__init__(method, context)
        self._queries: dict[int, torch.Tensor] = {}

    def classify(self, batch: TestBatch) -> Prediction:
        body, images = prompted(self.network), batch.inputs
        queries = None if batch.number is None else self._queries.get(batch.number)
        if queries is None:
            queries = self.trainer.features(self.network, images, of=body.queries)
            if batch.number is not None:
                self._queries[batch.number] = queries
        features = self.trainer.features(self.network, images, queries)
        return Prediction(self.heads.class_scores(self.logits(features)))


@dataclass
class PromptMethod(GradientMethod):
    """A method that trains prompts inside a frozen ViT, and class weights.

    It is FedAvg of the prompts, keys and class weights that train; nothing else travels. Clients keep nothing.

    Args:
        training: as in every gradient method.
        loss_over: whose scores compete in the loss; here by default the task's own.
        frozen_heads: whether the class weights of old tasks stay as they are; here they do.
    """

    client_half = PromptClient
    server_half = PromptServer
    averages = True
    inside_transformers: ClassVar[bool] = True

    training: Training = field(default_factory=lambda: Training(optimizer="adam", lr=1e-3, weight_decay=0.0))
    loss_over: str = knob("task", choices=("seen", "task"))
    frozen_heads: bool = True

    #: The method's name on the command line.
    name: ClassVar[str]

    @abstractmethod
    def prompts(self, dimension: int) -> Prompts:
        """The prompts before the first task, for tokens of `dimension` numbers."""

    @property
    @abstractmethod
    def prompted_layers(self) -> dict[str, list[int]]:
        """The layers that take prompts, by the key that sets them, for messages."""

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        start = self.start(context)
        blocks = transformer_blocks(start.build(), self.name, start.name)
        for key, layers in self.prompted_layers.items():
            require_layers(key, layers, len(blocks))

    def build_network(self, context: Context) -> Network:
        network = super().build_network(context)
        [first, *_] = transformer_blocks(network.body, self.name, self.start(context).name)
        network.put_body(PromptedViT(network.body, self.prompts(dimension_of(first))))
        return network

    def grow(self, network: Network, sizes: list[int], seed: int) -> None:
        prompts = prompted(network).prompts
        while prompts.tasks < len(sizes):
            prompts.grow(derived_seed(seed, "prompts", prompts.tasks) % 2**62)
        prompts.to(network.device)
        super().grow(network, sizes, seed)

    def frozen(
        self, network: Network, stages: tuple[str, ...], task: int, reused: Container[int] = frozenset()
    ) -> set[str]:
        old = {f"body.prompts.{name}" for name in prompted(network).prompts.old()}
        return super().frozen(network, stages, task, reused) | old
