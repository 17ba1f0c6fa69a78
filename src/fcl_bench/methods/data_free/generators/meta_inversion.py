"""TARGET's images of the classes that a frozen network knows (Zhang et al., ICCV 2023).

For each batch a copy of a generator G and the batch's noise z learn together, over a few steps of Adam, to minimise L
of `generators.synthesis` for u = G(z). From all of a batch's steps G itself then moves to where the next copy starts
better (first-order MAML, or Reptile).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment, Standardise
from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.methods.data_free.generators.images import ImageGenerator, to_bytes
from fcl_bench.methods.data_free.generators.synthesis import BETAS, Inversion, SynthesisKnobs
from fcl_bench.training.network import Network

#: How hard Reptile pulls G towards the copy.
_PULL = 67.0
#: Momentum and weight decay of the student's SGD, and the number of batches over which its step size falls to 0.
_MOMENTUM, _DECAY, _PERIOD = 0.9, 1e-4, 200


@dataclass
class Synthesis(SynthesisKnobs):
    """`method.synthesis`: how images are made. The defaults are those of CIFAR-100.

    Args:
        images: how many of each task; None: as many as the method's variant has.
        warmup: batches before the student learns and plays a part.
        lr_z: step size of the noise; `lr_g` is that of G's copy, and G itself moves by `lr_g` times `g_steps`.
        meta: how G learns from its copy's steps: maml (the sum of their gradients), reptile (where they led).
        kd_steps: of the student, on batches of what there is so far, after every batch from `warmup` on.
        lr_student: step size of its SGD at first.
    """

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
        """`count` images (count, 3, size, size) in uint8, and (count,) the classes that were asked for.

        Args:
            count: how many.
            classes: the columns 0 to `classes` - 1 are asked for, each as likely.
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
                self.teach(torch.cat(made), torch.cat(wanted))
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

    def teach(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """As in `Inversion`.

        Raises:
            UserError: the student's weights are no longer finite.
        """
        super().teach(images, labels)
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
