"""TARGET: images of old classes, made by the server from the last model, are distilled to it (Zhang et al., ICCV 2023).

Before every task but the first, the server makes images u of the classes seen so far (`methods.data_free.generators
.meta_inversion`) by the model with which the last task ended, the teacher. In the task clients minimise

    CE over the task's classes of their own samples - kd mean_u sum_c softmax(q'(u) / T)_c log softmax(q(u) / T)_c,

c over the old classes, q' the teacher's logits; as in the public code there is no factor T^2. Clients keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment, Augmentation, Samples
from fcl_bench.environment import seeded
from fcl_bench.methods.data_free.generative import DataFreeClient, DataFreeMethod, DataFreeServer
from fcl_bench.methods.data_free.generators.images import ImageGenerator, to_bytes
from fcl_bench.methods.data_free.generators.meta_inversion import MetaInversion, Synthesis
from fcl_bench.methods.data_free.generators.replay import GeneratedImages, ImagePool
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import derived_seed
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: The name of `right` in a state.
_RIGHT = "synthesis_right"
#: Images of a task, and synthetic images of a client's step, by variant; None: as many as its own samples.
_IMAGES = {"paper": 8000, "published": 2560}
_SYNTHETIC = {"paper": None, "published": 500}


class Rehearsed(Objective):
    """The loss on a client's own samples, and the distillation of synthetic ones.

    Args:
        heads, over, rest: see `Objective`.
        teacher: scores the old classes; its logits are the first ones of the model that learns.
        synthetic: so many images, as the network sees them.
        count: of them in each step.
        strength: kd.
        temperature: T.
    """

    def __init__(
        self,
        heads: Heads,
        over: str,
        rest: bool,
        teacher: Network,
        synthetic: Callable[[int], torch.Tensor],
        count: int,
        strength: float,
        temperature: float,
    ) -> None:
        super().__init__(heads, over, rest)
        self._teacher, self._synthetic, self._count = teacher, synthetic, count
        self._strength, self._temperature = strength, temperature

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss, T = super().loss(network, inputs, labels), self._temperature
        images = self._synthetic(self._count)
        with torch.no_grad():
            wanted = (self._teacher(images) / T).softmax(dim=1)
        # Two forward passes, as in the public code: batch norm never mixes real and synthetic images.
        return loss + self._strength * cross_entropy(network(images)[:, : wanted.shape[1]] / T, wanted)


class Shortened(Samples):
    """The first `most` batches of every pass."""

    def __init__(self, own: Samples, most: int) -> None:
        super().__init__(own.inputs, own.labels)
        self._most = most

    def batches(
        self, size: int, augment: Augmentation, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from islice(super().batches(size, augment, generator), self._most)


class TARGETClient(DataFreeClient):
    """Trains on its own samples and on synthetic images of old classes."""

    method: TARGET

    def samples(self, client_data: ClientData, broadcast: Message, state: State) -> Samples:
        own = super().samples(client_data, broadcast, state)
        made = self.made(client_data, broadcast)
        if not made or self.method.variant == "paper":
            return own
        return Shortened(own, -(-len(made["images"]) // self.method.per_step))

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        teacher, method = self.teacher(client_data, broadcast), self.method
        if teacher is None:
            return super().objective(client_data, broadcast, state)
        return Rehearsed(
            Heads.from_message(broadcast),
            method.loss_over,
            method.frozen_heads,
            teacher,
            self.synthetic(client_data, broadcast),
            method.per_step,
            method.kd,
            method.temperature,
        )

    def synthetic(self, client_data: ClientData, broadcast: Message) -> Callable[[int], torch.Tensor]:
        """A source of synthetic images, as the network sees them, with a random stream of its own."""
        made, seed = self.made(client_data, broadcast), self.synthetic_seed(client_data, broadcast)
        augment = Augment(self.method.training.augment)
        if self.method.send == "generator":
            generator = self.method.received(made, self.context)
            return GeneratedImages(generator, seed, augment, self.scale).next
        # Distillation looks at no label, so none is sent.
        labels = torch.zeros(len(made["images"]), dtype=torch.int64, device=self.context.device)
        pool = ImagePool(made["images"], labels, seed, augment, self.scale)
        return lambda count: pool.next(count)[0]


class TARGETServer(DataFreeServer):
    """Makes the images of old classes.

    Attributes:
        right: for each task so far that had images, the share that the teacher takes for the class asked for.
    """

    method: TARGET

    def __init__(self, method: TARGET, context: Context) -> None:
        super().__init__(method, context)
        self.right: list[float] = []

    def synthesise(self, task: Task) -> None:
        method = self.method
        inversion = MetaInversion(
            method.synthesis,
            self.network,
            self.start.size,
            self.scale,
            Augment(method.training.augment),
            self.trainer.autocast,
        )
        images, labels = inversion.run(method.images, task.new_columns.start, method.variant == "published")
        self.right.append(float((self._named(images) == labels).double().mean()))
        if method.send == "images":
            self.made = {"images": images}
        else:
            self.made = {name: value.detach() for name, value in inversion.generator.named_parameters()}

    def samples_to_show(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images, and what the teacher takes them for."""
        images = self.made.get("images")
        if images is None:
            seed = derived_seed(self.context.seed, "shown")
            generator = self.method.received(self.made, self.context)
            images = to_bytes(GeneratedImages(generator, seed, Augment("none"), self.scale).pixels(count))
        return images[:count], self._named(images[:count])

    def _named(self, images: torch.Tensor) -> torch.Tensor:
        """(n,) the columns that `network` names."""
        return self.network.logits(self.embed(images)).argmax(dim=1)

    def report(self) -> dict[str, Any]:
        """`synthesis_right`, and the bytes of G if it is sent."""
        own: dict[str, Any] = {"synthesis_right": self.right} if self.right else {}
        if self.made and self.method.send == "generator":
            own["generator_bytes"] = sum(value.nbytes for value in self.made.values())
        return {**super().report(), **own}

    def state_dict(self) -> dict[str, torch.Tensor]:
        own = {_RIGHT: torch.tensor(self.right, dtype=torch.float64)} if self.right else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        super().load_state_dict(state)
        self.right = state[_RIGHT].tolist() if _RIGHT in state else []


@dataclass
class TARGET(DataFreeMethod):
    """Knobs of TARGET.

    Args:
        kd: weight of the distillation; 0: fedavg, nothing is made.
        temperature: T, of the distillation.
        synthetic_batch: synthetic images in each step of a client; None: as many as `training.batch_size`, or 500
            with `variant=published`.
        variant: paper: 8,000 images, a student that learns after 20 batches which are not kept, and a client's steps
            are those of its own samples, however many synthetic ones there are. published: as the public code does it:
            2,560 images, the first batches are kept and count, and a pass ends with the synthetic images.
        synthesis: how images are made.
    """

    name: ClassVar[str] = "target"
    client_half = TARGETClient
    server_half = TARGETServer

    kd: float = knob(25.0, least=0)
    temperature: float = knob(2.0, above=0)
    synthetic_batch: int | None = knob(None, least=2)
    variant: str = knob("paper", choices=("paper", "published"))
    synthesis: Synthesis = field(default_factory=Synthesis)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "published":
            self.require_published(send="images")

    @property
    def images(self) -> int:
        """How many images are made for a task."""
        return _IMAGES[self.variant] if self.synthesis.images is None else self.synthesis.images

    @property
    def per_step(self) -> int:
        """Synthetic images in each step of a client."""
        return self.synthetic_batch or _SYNTHETIC[self.variant] or self.training.batch_size

    @property
    def replays(self) -> bool:
        return self.kd > 0 and self.images > 0

    def received(self, values: dict[str, torch.Tensor], context: Context) -> ImageGenerator:
        """The generator with these parameters."""
        with seeded(0):  # its first weights are drawn, and replaced
            generator = ImageGenerator(self.synthesis.noise, self.start(context).size).to(context.device)
        generator.load(values)
        return generator
