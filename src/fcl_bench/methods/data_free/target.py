"""TARGET: images of old classes, made by the server from the last model, are distilled to it (Zhang et al., ICCV 2023).

Before every task but the first, the server makes images u of the classes seen so far by the model with which the last
task ended, the teacher. In the task clients minimise

    CE over the task's classes of their own samples - kd mean_u sum_c softmax(q'(u) / T)_c log softmax(q(u) / T)_c,

c over the old classes, q' the teacher's logits; as in the public code there is no factor T^2. Clients keep nothing.

For each batch of images a copy of a generator G and the batch's noise z learn together, over a few steps of Adam, to
minimise L of `generators.synthesis` for u = G(z). From all of a batch's steps G itself then moves to where the next
copy starts better (first-order MAML, or Reptile).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment, Augmentation, Samples, Standardise
from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.methods.data_free.generative import DataFreeClient, DataFreeMethod, DataFreeServer
from fcl_bench.methods.data_free.generators.images import ImageGenerator, ImagePool, to_bytes
from fcl_bench.methods.data_free.generators.synthesis import BETAS, Inversion, SynthesisKnobs
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.message import Message
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective, distillation

#: How hard Reptile pulls G towards the copy.
_PULL = 67.0
#: Momentum and weight decay of the student's SGD, and the number of batches over which its step size falls to 0.
_MOMENTUM, _DECAY, _PERIOD = 0.9, 1e-4, 200


@dataclass
class Synthesis(SynthesisKnobs):
    """`method.synthesis`: how images are made. The defaults are those of CIFAR-100, see conf/method/target.yaml."""

    images: int | None = knob(None, least=0)
    warmup: int = knob(20, least=0)
    lr_z: float = knob(0.01, above=0)
    bn: float = knob(10.0, least=0)
    meta: str = knob("maml", choices=("maml", "reptile"))
    kd_steps: int = knob(400, least=0)
    lr_student: float = knob(0.2, above=0)


class MetaInversion(Inversion[Network]):
    """Makes images of one network (see `Inversion`). Its logits are those of the classes.

    Args:
        knobs, network, standardise, augment, autocast: see `Inversion`.
        size: side of the network's images.

    Attributes:
        generator: G.
    """

    _knobs: Synthesis

    def __init__(
        self,
        knobs: Synthesis,
        network: Network,
        size: int,
        standardise: Standardise,
        augment: Augment,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._device = next(network.parameters()).device
        self.generator = ImageGenerator(knobs.noise, size).to(self._device)
        super().__init__(knobs, network, standardise, augment, knobs.batch, autocast)
        self._meta = torch.optim.Adam(self.generator.parameters(), knobs.lr_g * knobs.g_steps, betas=BETAS)
        self._optimiser = torch.optim.SGD(self._learning, lr=knobs.lr_student, momentum=_MOMENTUM, weight_decay=_DECAY)
        self._lessons = 0

    def run(self, count: int, classes: int, keeps_warmup: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` images (count, 3, size, size) in uint8, and (count,) the classes that were requested.

        Args:
            count: how many.
            classes: the columns 0 to `classes` - 1 are requested, each as likely.
            keeps_warmup: whether the first `warmup` batches are among the images, or come before them.
        """
        knobs = self._knobs
        before = 0 if keeps_warmup else knobs.warmup
        made: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for number in range(before + math.ceil(count / knobs.batch)):
            warm = number >= knobs.warmup
            labels = torch.randint(classes, (knobs.batch,)).to(self._device)
            images = to_bytes(self.batch(labels, knobs.adv > 0 and warm))
            if number >= before:
                made.append(images)
                wanted.append(labels)
            if knobs.adv and warm:
                self.teach(torch.cat(made))
        return torch.cat(made)[:count], torch.cat(wanted)[:count]

    def batch(self, labels: torch.Tensor, adversarial: bool) -> torch.Tensor:
        """Images (b, 3, size, size) from 0 to 1, of the classes `labels` (b,); G learns from the batch.

        Raises:
            UserError: L was never finite.
        """
        knobs = self._knobs
        noise = self.generator.noise(len(labels)).requires_grad_()
        inner = copy.deepcopy(self.generator)
        groups: list[dict[str, Any]] = [{"params": [noise], "lr": knobs.lr_z}, {"params": inner.parameters()}]
        optimiser = torch.optim.Adam(groups, lr=knobs.lr_g, betas=BETAS)
        self._meta.zero_grad()

        def collect() -> None:
            if knobs.meta == "maml":
                self._add_gradients(inner)

        best = self.descend(lambda: inner(noise), optimiser, labels, adversarial, collect)
        if knobs.meta == "reptile":
            self._pull(inner)
        self._meta.step()
        return best

    def student_optimiser(self) -> torch.optim.Optimizer:
        """One for all lessons, whose step size falls from lesson to lesson."""
        for group in self._optimiser.param_groups:
            group["lr"] = self._knobs.lr_student * (1 + math.cos(math.pi * self._lessons / _PERIOD)) / 2
        self._lessons += 1
        return self._optimiser

    def teach(self, images: torch.Tensor) -> None:
        """As in `Inversion`. Raises a `UserError`: the student's weights are no longer finite."""
        super().teach(images)
        if not all_finite(*self.student.state().values()):
            raise UserError(
                f"method.synthesis.lr_student={self._knobs.lr_student:g}: the student diverged",
                "a smaller method.synthesis.lr_student",
            )

    def _add_gradients(self, inner: ImageGenerator) -> None:
        for own, theirs in zip(self.generator.parameters(), inner.parameters(), strict=True):
            assert theirs.grad is not None
            own.grad = theirs.grad.clone() if own.grad is None else own.grad.add_(theirs.grad)

    def _pull(self, inner: ImageGenerator) -> None:
        for own, theirs in zip(self.generator.parameters(), inner.parameters(), strict=True):
            own.grad = _PULL * (own.detach() - theirs.detach())


#: Images of a task, and synthetic images of a client's step, by variant; None: as many as its own samples.
_IMAGES = {"paper": 8000, "published": 2560}
_SYNTHETIC = {"paper": None, "published": 500}


class Rehearsed(Objective):
    """The loss on a client's own samples, and the distillation of synthetic ones.

    Args:
        teacher: scores the old classes; its logits are the first ones of the model that learns.
        pool: of synthetic images.
    """

    def __init__(self, heads: Heads, method: TARGET, teacher: Network, pool: ImagePool) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._method, self._teacher, self._pool = method, teacher, pool

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().loss(network, inputs, labels)
        images = self._pool.next(self._method.per_step)
        with torch.no_grad():
            known = self._teacher(images)
        # Two forward passes, as in the public code: batch norm never mixes real and synthetic images.
        return loss + self._method.kd * distillation(network(images), known, self._method.temperature)


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
        if not made or not self.method.published:
            return own
        return Shortened(own, -(-len(made["images"]) // self.method.per_step))

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        teacher = self.teacher(client_data, broadcast)
        if teacher is None:
            return super().objective(client_data, broadcast, state)
        images, seed = self.made(client_data, broadcast)["images"], self.synthetic_seed(client_data, broadcast)
        pool = ImagePool(images, seed, Augment(self.method.training.augment), self.scale)
        return Rehearsed(Heads.from_message(broadcast), self.method, teacher, pool)


class TARGETServer(DataFreeServer):
    """Makes the images of old classes.

    Attributes:
        right: for each task so far that had images, the share that the teacher takes for the class requested.
    """

    method: TARGET
    state = ("right",)

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
        images, labels = inversion.run(method.images, task.new_columns.start, method.published)
        self.right.append(float((self._named(images) == labels).double().mean()))
        self.made = {"images": images}

    def samples_to_show(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images, and what the teacher takes them for."""
        images = self.made["images"][:count]
        return images, self._named(images)

    def _named(self, images: torch.Tensor) -> torch.Tensor:
        """(n,) the columns that `network` names."""
        return self.network.logits(self.embed(images)).argmax(dim=1)

    def report(self) -> dict[str, Any]:
        """`synthesis_right`."""
        return {**super().report(), **({"synthesis_right": self.right} if self.right else {})}


@dataclass
class TARGET(DataFreeMethod):
    name: ClassVar[str] = "target"
    search: ClassVar[Mapping[str, str]] = {"kd": "log(1,100)"}
    client_half = TARGETClient
    server_half = TARGETServer

    kd: float = knob(25.0, least=0)
    temperature: float = knob(2.0, above=0)
    synthetic_batch: int | None = knob(None, least=2)
    variant: str = knob("paper", choices=("paper", "published"))
    synthesis: Synthesis = field(default_factory=Synthesis)

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
