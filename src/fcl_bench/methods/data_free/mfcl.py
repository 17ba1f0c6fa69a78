"""MFCL: a generator of images, trained by the server, goes to the clients (Babakniya et al., NeurIPS 2023).

After a task the server trains the one generator G further on images u = G(z), z standard normal, under the task's final
model q' with old columns O, its features phi':

    CE(q'(u) / T, argmax q'(u)) + w_ie (1 + sum_{c in O} p_c log p_c / log |O|) + w_bn R(u) + w_smooth mse(u, blur(u)),

p the batch's mean softmax, R the divergence of batch norms' statistics (`synthesis.divergence`). In the next task a
client's step has a batch x of its own and as many u as `synthetic` says, with labels argmax q'(u):

    CE over the task's classes, of x
    + w_ft CE over all classes seen of W sg[phi] + b, of x and u              (sg: a constant; only heads learn by it)
    + w_kd mean_{x, u} || V phi - V phi' ||^2 / |O|,                           V the heads of q', frozen.

The terms of u are those of ABD (Smith et al., ICCV 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy, linear, mse_loss

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.methods.data_free.generative import DataFreeClient, DataFreeMethod, DataFreeServer
from fcl_bench.methods.data_free.generators.images import WIDTH, ImageGenerator, to_bytes
from fcl_bench.methods.data_free.generators.synthesis import InputStatistics, LayerStatistics, divergence
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: Side of the kernel of `blurred`; images are mirrored at their borders.
BLUR = 5


def imbalance(scores: torch.Tensor) -> torch.Tensor:
    """1 + sum_c p_c log p_c / log C, p the mean of the softmax of `scores` (b, C) over the batch.

    It is 0 if the batch has every class alike, 1 if it has one class alone, and 0 if C is 1.
    """
    classes = scores.shape[1]
    if classes < 2:
        return scores.new_zeros(())
    p = scores.softmax(dim=1).mean(dim=0).clamp(min=torch.finfo(scores.dtype).tiny)
    return 1 + (p * p.log()).sum() / math.log(classes)


def blurred(images: torch.Tensor, sigma: float = 1.0) -> torch.Tensor:
    """Images (b, 3, h, w), of at least 3 pixels a side, after a Gaussian of width `sigma` over 5 x 5 pixels."""
    down, across = (_blur(size, sigma, images) for size in images.shape[2:])
    # Two products with small matrices are several times faster than a convolution of 3 separate channels.
    return down @ images @ across.T


def _blur(size: int, sigma: float, like: torch.Tensor) -> torch.Tensor:
    """(size, size): what each blurred pixel of a line takes of every pixel."""
    away = torch.arange(BLUR, device=like.device) - BLUR // 2
    weights = torch.exp(-away.to(like.dtype).square() / (2 * sigma**2))
    last = size - 1
    source = last - (last - (torch.arange(size, device=like.device)[:, None] + away).abs()).abs()
    matrix = like.new_zeros(size, size)
    return matrix.scatter_add_(1, source, (weights / weights.sum()).expand(size, BLUR))


#: The public code's T, and the width of its blur, whose exponent has 4 in place of 2.
_PUBLISHED_TEMPERATURE, _PUBLISHED_BLUR = 1000.0, 2**0.5
#: The eps of the batch norms of G, in the public code.
_EPS = 0.8


@dataclass
class Generation:
    """`method.generator`: the network G, and how the server trains it, see conf/method/mfcl.yaml."""

    noise: int = knob(1000, least=1)
    width: int = knob(WIDTH, least=2)
    scale: float = knob(1.0, above=0)
    steps: int = knob(1000, least=1)
    batch_size: int = knob(128, least=2)
    lr: float = knob(1e-3, above=0)
    temperature: float = knob(1.0, above=0)
    w_ie: float = knob(1.0, least=0)
    w_bn: float = knob(50.0, least=0)
    w_smooth: float = knob(1e-3, least=0)


class Replaying(Objective):
    """The clients' loss.

    Args:
        teacher: q'.
        generator: G as broadcast, in evaluation mode.
        seed: of z, a stream of its own.
    """

    def __init__(self, heads: Heads, method: MFCL, teacher: Network, generator: ImageGenerator, seed: int) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._all = Objective(heads, "seen")
        self._columns = torch.tensor(heads.logits)
        self._teacher, self._made_by, self._knobs = teacher, generator, method
        self._old = torch.cat(
            [value for name, value in teacher.heads.named_parameters() if name.endswith("weight")]
        )  # V
        self._random = torch.Generator().manual_seed(seed)

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        knobs, own = self._knobs, len(inputs)
        with torch.no_grad():
            made = knobs.images(self._made_by, self._made_by.noise(knobs.synthetic, self._random))
            together = torch.cat([inputs, made.to(inputs)]).contiguous(memory_format=torch.channels_last)
            wanted = self._teacher.body(together)
        # One forward pass, so that batch norm takes its statistics from both.
        features = network.body(together)
        loss = self.score_loss(network.logits(features[:own]), labels, inputs)
        if knobs.w_ft:
            predicted = self._columns.to(labels.device)[self._teacher.logits(wanted[own:]).argmax(dim=1)]
            scores = network.logits(self._constant(network, features, together))
            loss = loss + knobs.w_ft * cross_entropy(*self._all.competing(scores, torch.cat([labels, predicted])))
        if knobs.w_kd:
            apart = linear(features - wanted, self._old)
            loss = loss + knobs.w_kd * apart.square().mean()
        return loss

    def _constant(self, network: Network, features: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """sg[phi]; published: of a second forward pass, which moves the running statistics once more."""
        if not self._knobs.published:
            return features.detach()
        with torch.no_grad():
            again: torch.Tensor = network.body(images)
        return again


class MFCLClient(DataFreeClient):
    """Trains with the generator and the old model beside it."""

    method: MFCL

    def __init__(self, method: MFCL, context: Context) -> None:
        super().__init__(method, context)
        self._generator: ImageGenerator | None = None

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        values, teacher = self.made(client_data, broadcast), self.teacher(client_data, broadcast)
        if teacher is None or not values:
            return super().objective(client_data, broadcast, state)
        if self._generator is None:
            self._generator = self.method.new_generator(self.context).eval().requires_grad_(False)
        self._generator.load(values)
        seed = self.synthetic_seed(client_data, broadcast)
        return Replaying(Heads.from_message(broadcast), self.method, teacher, self._generator, seed)


class MFCLServer(DataFreeServer):
    """Keeps G, whose tensors are what it has made, and trains it after each task but the last."""

    method: MFCL

    def synthesise(self, task: Task) -> None:
        knobs, generator = self.method.generator, self.method.new_generator(self.context)
        generator.load(self.made)
        optimiser = torch.optim.Adam(generator.parameters(), lr=knobs.lr)
        with InputStatistics(self.network) as statistics:
            for _ in range(knobs.steps):
                images = self.method.images(generator, generator.noise(knobs.batch_size))
                with self.trainer.autocast():
                    scores = self.network(images)
                loss = self.loss(images, scores.float(), statistics.layers())
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
        if not all_finite(*generator.state().values()):
            raise UserError(
                f"method.generator.lr={knobs.lr:g}: the generator diverged", "a smaller method.generator.lr"
            )
        self.made = {name: value.clone() for name, value in generator.state().items()}

    def loss(self, images: torch.Tensor, scores: torch.Tensor, layers: list[LayerStatistics]) -> torch.Tensor:
        """G's loss of a batch.

        Args:
            images: (b, 3, size, size) u.
            scores: (b, |O|) q'(u).
            layers: the statistics of its batch norms' inputs.
        """
        knobs, method = self.method.generator, self.method
        loss = cross_entropy(scores / method.temperature, scores.argmax(dim=1))
        if knobs.w_ie:
            loss = loss + knobs.w_ie * imbalance(scores)
        if knobs.w_bn and layers:
            loss = loss + knobs.w_bn * divergence(layers)
        if knobs.w_smooth:
            loss = loss + knobs.w_smooth * mse_loss(images, blurred(images, _PUBLISHED_BLUR if method.published else 1))
        return loss

    @torch.no_grad()
    def samples_to_show(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = self.method.new_generator(self.context).eval()
        generator.load(self.made)
        seed = derived_seed(self.context.seed, "shown")
        images = self.method.images(generator, generator.noise(count, torch.Generator().manual_seed(seed)))
        columns = torch.tensor(self.heads.logits, device=images.device)[self.network(images).argmax(dim=1)]
        start = self.start
        mean, std = (torch.tensor(value, device=images.device).view(3, 1, 1) for value in (start.mean, start.std))
        return to_bytes(images * std + mean), columns

    def report(self) -> dict[str, Any]:
        """`generator_bytes`: what G adds to a client's first broadcast of a task."""
        sizes = [value.nbytes for value in self.made.values()]
        return {**super().report(), **({"generator_bytes": sum(sizes)} if sizes else {})}


@dataclass
class MFCL(DataFreeMethod):
    name: ClassVar[str] = "mfcl"
    search: ClassVar[Mapping[str, str]] = {"w_kd": "log(0.01,1)"}
    client_half = MFCLClient
    server_half = MFCLServer

    training: Training = field(
        default_factory=lambda: Training(
            rounds=100,
            epochs=10,
            batch_size=32,
            lr=0.1,
            schedule="exponential",
            weight_decay=1e-5,
            weighting="uniform",
        )
    )
    synthetic: int = knob(128, least=1)
    w_ft: float = knob(1.0, least=0)
    w_kd: float = knob(0.1, least=0)
    generator: Generation = field(default_factory=Generation)
    variant: str = knob("working", choices=("working", "published"))

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.generator.temperature
        if self.published and given not in (Generation.temperature, _PUBLISHED_TEMPERATURE):
            raise UserError(
                f"method.generator.temperature={given:g} contradicts method.variant=published",
                f"{_PUBLISHED_TEMPERATURE:g}, or method.variant=working",
            )

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        size = self.start(context).size
        if self.replays and self.generator.w_smooth and size <= BLUR // 2:
            raise UserError(
                f"method.generator.w_smooth={self.generator.w_smooth:g}: images of {size} pixels are too small to blur",
                "method.generator.w_smooth=0",
            )

    @property
    def replays(self) -> bool:
        return self.w_ft > 0 or self.w_kd > 0

    @property
    def temperature(self) -> float:
        """T."""
        return _PUBLISHED_TEMPERATURE if self.published else self.generator.temperature

    def new_generator(self, context: Context) -> ImageGenerator:
        """A new G; torch draws its first weights."""
        size, knobs = self.start(context).size, self.generator
        made = ImageGenerator(knobs.noise, size, output="tanh", eps=_EPS, width=knobs.width)
        return made.to(context.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def images(self, generator: ImageGenerator, noise: torch.Tensor) -> torch.Tensor:
        """What the network sees of G(z), (b, 3, size, size)."""
        made: torch.Tensor = self.generator.scale * generator(noise)
        return made
