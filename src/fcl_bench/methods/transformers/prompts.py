"""What prompt methods share: a frozen ViT whose prompts grow with the tasks, and frozen heads of old tasks.

Prompts are prefixes: keys and values that a block's attention takes beside those of its tokens (Li and Liang, 2021).
They are chosen or mixed by the image's query, its features without a prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import nn

from fcl_bench.data.images.batches import Augmentation, Samples, epoch_batches
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.methods.transformers.low_rank import dimension_of, require_layers, transformer_blocks
from fcl_bench.protocol import compute
from fcl_bench.protocol.context import ClientData, Context, Prediction, State, TestBatch
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

if TYPE_CHECKING:
    from timm.models.vision_transformer import Attention


class PrefixAttention(nn.Module):
    """timm's attention with keys [P_K; W_K h] and values [P_V; W_V h]; queries are those of the tokens h alone.

    The prompt enters after the projections, so the number of tokens does not change.

    Args:
        attention: the attention of a block; it does not change.

    Attributes:
        prefix: (b, L, d), or (1, L, d) for the same prompt in all images: P_K are its first L/2 rows, P_V the others.
            None: the attention as it was, bit for bit.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.prefix: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, *masks: object, **others: object) -> torch.Tensor:
        """Tokens (b, N, d) to tokens (b, N, d). Further arguments of timm's blocks are for masks."""
        own = self.attention
        if self.prefix is None:
            return own(x, *masks, **others)
        batch, tokens, _ = x.shape
        query, key, value = own.qkv(x).reshape(batch, tokens, 3, own.num_heads, own.head_dim).permute(2, 0, 3, 1, 4)
        first, second = (self._by_head(half, batch) for half in self.prefix.to(x.dtype).chunk(2, dim=1))
        query, key = own.q_norm(query), own.k_norm(key)
        key, value = torch.cat([first.to(key.dtype), key], dim=2), torch.cat([second.to(value.dtype), value], dim=2)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=own.scale)
        mixed = mixed.transpose(1, 2).flatten(2)
        # Newer versions of timm can normalise and gate the heads' outputs.
        if (norm := getattr(own, "norm", None)) is not None:
            mixed = norm(mixed)
        if (gate := getattr(own, "gate", None)) is not None:
            mixed = mixed * gate(x).sigmoid()
        return own.proj_drop(own.proj(mixed))

    def _by_head(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """(b or 1, L/2, d) to (b, heads, L/2, d/heads)."""
        own = self.attention
        return rows.expand(batch, -1, -1).unflatten(2, (own.num_heads, own.head_dim)).transpose(1, 2)


class Prompts(nn.Module, ABC):
    """The prompts of a method: parameters that grow with the tasks, and how an image's prompt is made of them.

    The ViT itself is frozen, so all body parameters that train are here.

    Attributes:
        layers: the blocks, from 0, that take a prompt.
        tasks: the number of tasks that `grow` has made room for.
        penalty: the last forward pass's term of the loss, a scalar; 0 without one.
    """

    layers: tuple[int, ...]
    penalty: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tasks = 0
        self.penalty = torch.zeros(())

    @abstractmethod
    def grow(self, seed: int) -> None:
        """Add the parameters of task `self.tasks`, drawn by the seed on the CPU, and count the task.

        The caller moves them to the device of the others.
        """

    @abstractmethod
    def forward(self, queries: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """The prompt of each layer that takes one, for images with those queries.

        In train mode, methods that know the task use the last task's prompts; in evaluation mode all tasks' count.

        Args:
            queries: (b, d), constants.

        Returns:
            (b, L, d), or (1, L, d) for the same in all images; see `PrefixAttention`.
        """

    def old(self) -> set[str]:
        """Names of the parameters of the tasks before the last, which no longer train; by default all train."""
        return set()


def cosines(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(b, ...) the cosine of each query (b, d) with each key (..., d), in float32 or better also under autocast."""
    dtype = torch.promote_types(queries.dtype, torch.promote_types(keys.dtype, torch.float32))
    with torch.autocast(queries.device.type, enabled=False):
        rows = nn.functional.normalize(queries.to(dtype), dim=-1), nn.functional.normalize(keys.to(dtype), dim=-1)
        return (rows[0] @ rows[1].flatten(0, -2).T).unflatten(1, keys.shape[:-1])


class PromptedViT(nn.Module):
    """Images (b, 3, size, size) to features (b, d) under their prompts.

    The query of an image is its features without a prompt, q(x). It costs a forward pass without gradients, unless
    `expect` has given it before.

    Args:
        vit: a ViT of timm without classifier; it no longer trains, and stays in evaluation mode.
        prompts: the prompts of the method; the ViT has the blocks `prompts.layers`.

    Attributes:
        last_queries: (b, d) of the last forward pass.
    """

    last_queries: torch.Tensor

    def __init__(self, vit: nn.Module, prompts: Prompts) -> None:
        super().__init__()
        self.vit = vit.requires_grad_(False)
        self.prompts = prompts
        blocks = vit.blocks
        assert isinstance(blocks, nn.Sequential)
        self._attention = {layer: PrefixAttention(blocks[layer].attn) for layer in prompts.layers}  # type: ignore[arg-type]
        for layer, attention in self._attention.items():
            blocks[layer].attn = attention
        self._expected: torch.Tensor | None = None

    def train(self, mode: bool = True) -> PromptedViT:
        """Switch the mode as in any module, but the ViT stays in evaluation mode."""
        super().train(mode)
        self.vit.eval()
        return self

    def expect(self, queries: torch.Tensor) -> None:
        """Give the queries (b, d) of the next forward pass's images."""
        self._expected = queries

    @torch.no_grad()
    def queries(self, images: torch.Tensor) -> torch.Tensor:
        """(b, d) the features without any prompt."""
        return self.under({}, images)

    def forward(self, images: torch.Tensor, queries: torch.Tensor | None = None) -> torch.Tensor:
        """Images (b, 3, size, size), with or without their queries (b, d), to features (b, d)."""
        expected, self._expected = self._expected, None
        queries = expected if queries is None else queries
        self.last_queries = self.queries(images) if queries is None else queries
        return self.under(self.prompts(self.last_queries), images)

    def under(self, prompts: Mapping[int, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
        """The features (b, d) under these prompts, by layer."""
        for layer, attention in self._attention.items():
            attention.prefix = prompts.get(layer)
        try:
            return self.vit(images)
        finally:
            for attention in self._attention.values():
                attention.prefix = None


def prompted(network: Network) -> PromptedViT:
    """The body of a prompt method's network."""
    return cast(PromptedViT, network.body)


class PromptObjective(Objective):
    """Cross-entropy, plus the penalty of the prompts."""

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(network, inputs, labels) + prompted(network).prompts.penalty

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

    def batches(
        self, size: int, augment: Augmentation, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for chosen in epoch_batches(len(self), size, generator, self.inputs.device):
            self._body.expect(self._queries[chosen])
            yield self.inputs[chosen], self.labels[chosen]


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
        # Counted in every round: a client keeps nothing, and a resumed run has to make them again.
        compute.count(forward=len(client_data.inputs))
        if found is None:
            # Autograd refuses tensors that were made in inference mode, so a copy is taken.
            with compute.uncounted():
                made = self.trainer.features(self.network, client_data.inputs, of=prompted(self.network).queries)
            found = self._queries[client_data.client] = made.clone()
        return found

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        return PromptObjective(Heads.from_message(broadcast), self.method.loss_classes, self.method.frozen_heads)


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

    Attributes:
        prompts_class: of its prompts, made of the method and the numbers of a token.
        layer_knobs: the knobs that hold the blocks that take prompts.
        length_knobs: those that hold a prompt's number of rows, half of which are keys and half values.
    """

    client_half = PromptClient
    server_half = PromptServer
    inside_transformers: ClassVar[bool] = True
    search: ClassVar[Mapping[str, str]] = {"training.lr": "log(1e-4,1e-2)", "training.momentum": ""}
    prompts_class: ClassVar[Callable[..., Prompts]]
    layer_knobs: ClassVar[tuple[str, ...]] = ("layers",)
    length_knobs: ClassVar[tuple[str, ...]] = ("length",)

    training: Training = field(default_factory=lambda: Training(optimizer="adam", lr=1e-3, weight_decay=0.0))
    frozen_heads: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in self.length_knobs:
            if (length := getattr(self, key)) % 2:
                raise UserError(
                    f"method.{key}={length} is odd: half of a prompt's rows are keys, half are values",
                    f"method.{key}={length + 1}",
                )

    def build_network(self, context: Context) -> Network:
        network = super().build_network(context)
        blocks = transformer_blocks(network.body, self.name, self.start(context).name)
        for key in self.layer_knobs:
            require_layers(f"method.{key}", getattr(self, key), len(blocks))
        network.put_body(PromptedViT(network.body, self.prompts_class(self, dimension_of(blocks[0]))))
        return network

    def grow(self, network: Network, sizes: list[int], seed: int) -> None:
        prompts = prompted(network).prompts
        while prompts.tasks < len(sizes):
            prompts.grow(derived_seed(seed, "prompts", prompts.tasks) % 2**62)
        prompts.to(network.device)
        super().grow(network, sizes, seed)

    def frozen(self, network: Network, task: int, reused: Container[int] = frozenset()) -> set[str]:
        old = {f"body.prompts.{name}" for name in prompted(network).prompts.old()}
        return super().frozen(network, task, reused) | old
