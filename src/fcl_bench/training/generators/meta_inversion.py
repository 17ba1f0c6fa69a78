"""Images of the classes that a frozen network knows, made from the network alone (TARGET; Zhang et al., ICCV 2023).

For each batch a copy of a generator G and the batch's noise z learn together, over a few steps of Adam, to minimise

    L(u) = bn R(u) + oh CE(q(u), y) - adv mean_u [ 1(argmax s(u) = argmax q(u)) KL(softmax q(u) || softmax s(u)) ],

u = G(z) augmented, y the classes that are asked for, q the network's logits, s those of a student, R as in
`batch_norm.Distance`. The batch's images are those of the step with the lowest L. From all of a batch's steps G itself
then moves to where the next copy starts better (first-order MAML, or Reptile). The student learns from the images made
so far, so that new ones are sought where it does not follow the network yet.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment, Standardise
from fcl_bench.errors import UserError
from fcl_bench.linalg.finite import all_finite
from fcl_bench.training.generators.batch_norm import Distance, InputStatistics, LayerStatistics
from fcl_bench.training.generators.images import ImageGenerator, to_bytes
from fcl_bench.training.generators.replay import ImagePool
from fcl_bench.training.generators.student import agreement, opposition, reinitialised
from fcl_bench.training.network import Network

#: Of Adam's two averages.
_BETAS = (0.5, 0.999)
#: How hard Reptile pulls G towards the copy.
_PULL = 67.0
#: Of the student's SGD: momentum, weight decay, and over how many batches of images its step size falls to 0.
_MOMENTUM, _DECAY, _PERIOD = 0.9, 1e-4, 200


@dataclass
class Synthesis:
    """`method.synthesis`: how images are made. The defaults are those of CIFAR-100.

    Args:
        images: how many of each task; None: as many as the method's variant has.
        batch: images made together.
        warmup: batches before the student learns and plays a part.
        noise: numbers of which G makes an image.
        g_steps: Adam's steps on each batch.
        lr_g, lr_z: their sizes, for G's copy and for the noise; G itself moves by `lr_g` times `g_steps`.
        bn, oh, adv: weights of the terms of L; 0: without.
        meta: how G learns of its copy's steps: maml (the sum of their gradients), reptile (where they led).
        kd_steps: of the student, on batches of what there is so far, after every batch from `warmup` on.
        lr_student: step size of its SGD at first.
        temperature: T of the student's loss, T^2 KL(softmax(q / T) || softmax(s / T)).
    """

    images: int | None = knob(None, least=0)
    batch: int = knob(256, least=2)
    warmup: int = knob(20, least=0)
    noise: int = knob(256, least=1)
    g_steps: int = knob(10, least=1)
    lr_g: float = knob(0.002, above=0)
    lr_z: float = knob(0.01, above=0)
    bn: float = knob(10.0, least=0)
    oh: float = knob(0.5, least=0)
    adv: float = knob(1.0, least=0)
    meta: str = knob("maml", choices=("maml", "reptile"))
    kd_steps: int = knob(400, least=0)
    lr_student: float = knob(0.2, above=0)
    temperature: float = knob(20.0, above=0)


class MetaInversion:
    """Makes images of one network. Every draw is of torch's own generators, so whoever makes one seeds those.

    Args:
        knobs: see `Synthesis`.
        network: the teacher, in evaluation mode, without gradients of its weights. Its logits are those of the classes.
        size: side of its images.
        standardise: from images to what it sees.
        augment: what happens to images before a network sees them.
        autocast: the precision of forward passes.

    Attributes:
        generator: G.
        student: s.
    """

    def __init__(
        self,
        knobs: Synthesis,
        network: Network,
        size: int,
        standardise: Standardise,
        augment: Augment,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._knobs, self._network, self._standardise = knobs, network, standardise
        self._augment, self._autocast = augment, autocast
        self._device = next(network.parameters()).device
        self.generator = ImageGenerator(knobs.noise, size).to(self._device)
        self.student = reinitialised(network)
        self._meta = torch.optim.Adam(self.generator.parameters(), knobs.lr_g * knobs.g_steps, betas=_BETAS)
        self._optimiser = torch.optim.SGD(
            [value for value in self.student.parameters() if value.requires_grad],
            lr=knobs.lr_student,
            momentum=_MOMENTUM,
            weight_decay=_DECAY,
        )
        self._lessons = 0
        self._distance = Distance()

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
        """Images (b, 3, size, size) from 0 to 1, of the classes `labels` (b,); G learns of it.

        Raises:
            UserError: L was never finite.
        """
        knobs = self._knobs
        self.student.eval().requires_grad_(False)
        noise = self.generator.noise(len(labels)).requires_grad_()
        inner = copy.deepcopy(self.generator)
        groups: list[dict[str, Any]] = [{"params": [noise], "lr": knobs.lr_z}, {"params": inner.parameters()}]
        optimiser = torch.optim.Adam(groups, lr=knobs.lr_g, betas=_BETAS)
        self._meta.zero_grad()
        best, lowest = None, math.inf
        layers: list[LayerStatistics] = []
        for _ in range(knobs.g_steps):
            with self._autocast():
                images = inner(noise).float()
            loss, layers = self.loss(images, labels, adversarial)
            if (value := float(loss.detach())) < lowest:
                best, lowest = images.detach(), value
            optimiser.zero_grad()
            loss.backward()
            if knobs.meta == "maml":
                self._add_gradients(inner)
            optimiser.step()
        self._distance.keep(layers)
        if knobs.meta == "reptile":
            self._pull(inner)
        self._meta.step()
        if best is None:
            raise UserError(
                f"method.synthesis.lr_g={knobs.lr_g:g}: no image has a finite loss", "a smaller method.synthesis.lr_g"
            )
        return best

    def loss(
        self, images: torch.Tensor, labels: torch.Tensor, adversarial: bool
    ) -> tuple[torch.Tensor, list[LayerStatistics]]:
        """L of images (b, 3, size, size) from 0 to 1, and what the network's batch norms saw; a weight of 0 is skipped.

        Args:
            images: before augmentation.
            labels: (b,).
            adversarial: whether the student plays a part.
        """
        knobs = self._knobs
        shown = self._standardise.pixels(self._augment(images, torch.default_generator))
        loss = shown.new_zeros(())
        with InputStatistics(self._network) as statistics:
            with self._autocast():
                scores = self._network(shown)
            layers = statistics.layers()
        scores = scores.float()
        if knobs.bn:
            loss = loss + knobs.bn * self._distance(layers)
        if knobs.oh:
            loss = loss + knobs.oh * cross_entropy(scores, labels)
        if adversarial:
            with self._autocast():
                said = self.student(shown).float()
            loss = loss + knobs.adv * opposition(said, scores)
        return loss, layers

    def teach(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """The student's steps on images (n, 3, size, size) in uint8.

        Raises:
            UserError: its weights are no longer finite.
        """
        knobs = self._knobs
        self.student.train()
        for group in self._optimiser.param_groups:
            group["lr"] = knobs.lr_student * (1 + math.cos(math.pi * self._lessons / _PERIOD)) / 2
            for value in group["params"]:
                value.requires_grad_(True)
        self._lessons += 1
        seed = int(torch.randint(2**62, ()))
        pool = ImagePool(images, labels, seed, self._augment, self._standardise)
        for _ in range(knobs.kd_steps):
            shown, _ = pool.next(knobs.batch)
            with self._autocast():
                with torch.no_grad():
                    wanted = self._network(shown).float()
                loss = agreement(self.student(shown).float(), wanted, knobs.temperature).mean()
            self._optimiser.zero_grad()
            loss.backward()
            self._optimiser.step()
        if not all_finite(*self.student.state().values()):
            raise UserError(
                f"method.synthesis.lr_student={knobs.lr_student:g}: the student diverged",
                "a smaller method.synthesis.lr_student",
            )

    def _add_gradients(self, inner: ImageGenerator) -> None:
        for own, theirs in zip(self.generator.parameters(), inner.parameters(), strict=True):
            assert theirs.grad is not None
            own.grad = theirs.grad.clone() if own.grad is None else own.grad.add_(theirs.grad)

    def _pull(self, inner: ImageGenerator) -> None:
        for own, theirs in zip(self.generator.parameters(), inner.parameters(), strict=True):
            own.grad = _PULL * (own.detach() - theirs.detach())
