"""Images of the classes that a frozen network knows, made from the network alone: what TARGET and LANDER share.

A generator learns over a few steps on each batch of images to minimise

    L(u) = bn R(u) + oh CE(q(u), y) + (a method's own) - adv mean_u [ 1(argmax s(u) = argmax q(u)) KL(q || s) ],

u its images, augmented, y the classes that are asked for, q the network's logits, s those of a student, R as in
`batch_norm.Distance`, KL of softmaxes. The batch's images are those of the step with the lowest L. The student learns
from the images made so far, so that new ones are sought where it does not follow the network yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic

import torch
from torch.nn.functional import cross_entropy

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augmentation, Standardise
from fcl_bench.errors import UserError
from fcl_bench.methods.data_free.generators.batch_norm import Distance, InputStatistics, LayerStatistics
from fcl_bench.methods.data_free.generators.replay import ImagePool
from fcl_bench.methods.data_free.generators.student import N, agreement, opposition, reinitialised

#: The decays of Adam's two averages.
BETAS = (0.5, 0.999)


@dataclass
class SynthesisKnobs:
    """The keys of `method.synthesis` that both methods have.

    Args:
        batch: images made together.
        noise: numbers of which the generator makes an image.
        g_steps: Adam's steps on each batch.
        lr_g: their size, for the generator.
        bn, oh, adv: weights of the terms of L; 0: without.
        kd_steps: of the student, between batches.
        temperature: T of the student's loss, T^2 KL(softmax(q / T) || softmax(s / T)).
    """

    batch: int = knob(256, least=2)
    noise: int = knob(256, least=1)
    g_steps: int = knob(10, least=1)
    lr_g: float = knob(2e-3, above=0)
    bn: float = knob(1.0, least=0)
    oh: float = knob(0.5, least=0)
    adv: float = knob(1.0, least=0)
    kd_steps: int = knob(50, least=0)
    temperature: float = knob(20.0, above=0)


class Inversion(ABC, Generic[N]):
    """Makes images of one network. It draws from torch's own generators, which the caller seeds.

    Args:
        knobs: see `SynthesisKnobs`.
        network: the teacher, in evaluation mode, without gradients of its weights.
        standardise: from images to what it sees.
        augment: what happens to images before a network sees them.
        lesson: images in a step of the student.
        autocast: the precision of forward passes.

    Attributes:
        student: s, as it has learnt so far.
    """

    def __init__(
        self,
        knobs: SynthesisKnobs,
        network: N,
        standardise: Standardise,
        augment: Augmentation,
        lesson: int,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._knobs, self._network, self._lesson = knobs, network, lesson
        self._standardise, self._augment, self._autocast = standardise, augment, autocast
        self.student = reinitialised(network)
        #: The student's parameters that learn.
        self._learning = [value for value in self.student.parameters() if value.requires_grad]
        self._distance = Distance()

    # What a method has of its own -------------------------------------------------------------------------------------

    @abstractmethod
    def student_optimiser(self) -> torch.optim.Optimizer:
        """What makes the student's steps in the lesson that begins."""

    def answers(self, network: N, shown: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a network says to images: its logits (b, C), and what else is compared."""
        return (network(shown),)

    def standardised(self, images: torch.Tensor) -> torch.Tensor:
        """What the networks see of images from 0 to 1."""
        return self._standardise.pixels(images)

    def class_terms(self, answers: tuple[torch.Tensor, ...], labels: torch.Tensor) -> list[torch.Tensor]:
        """The terms of L that depend on the classes `labels` (b,); a weight of 0 is skipped."""
        return [self._knobs.oh * cross_entropy(answers[0], labels)] if self._knobs.oh else []

    def disagreement(self, outputs: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The student's loss: how far its answers are from the network's."""
        return agreement(outputs[0], wanted[0], self._knobs.temperature).mean()

    # What they share --------------------------------------------------------------------------------------------------

    def descend(
        self,
        make: Callable[[], torch.Tensor],
        optimiser: torch.optim.Optimizer,
        labels: torch.Tensor,
        adversarial: bool,
        after_backward: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Make the optimiser's `g_steps` on L of the images that `make` makes; return those of the lowest L.

        Args:
            make: (b, 3, size, size) from 0 to 1.
            optimiser: of the parameters that make them.
            labels: (b,) the classes that are asked for.
            adversarial: whether the student plays a part.
            after_backward: looks at each step's gradients.

        Raises:
            UserError: L was never finite.
        """
        self.student.eval().requires_grad_(False)
        best, lowest = torch.empty(0), torch.tensor(torch.inf, device=labels.device)
        layers: list[LayerStatistics] = []
        for step in range(self._knobs.g_steps):
            with self._autocast():
                images = make().float()
            loss, layers = self.loss(images, labels, adversarial)
            value, here = loss.detach(), images.detach()
            # The loss is not read here, since that would wait for a GPU.
            best = torch.where(value < lowest, here, best) if step else here
            lowest = torch.where(value < lowest, value, lowest)
            if not loss.requires_grad:
                break  # all terms of this batch have a weight of 0
            optimiser.zero_grad()
            loss.backward()
            after_backward()
            optimiser.step()
        self._distance.keep(layers)
        if not bool(torch.isfinite(lowest)):
            raise UserError(
                f"method.synthesis.lr_g={self._knobs.lr_g:g}: no image has a finite loss",
                "a smaller method.synthesis.lr_g",
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
        shown = self.standardised(self._augment(images, torch.default_generator))
        with InputStatistics(self._network) as statistics:
            answers = self._answers(self._network, shown)
            layers = statistics.layers()
        terms = [knobs.bn * self._distance(layers)] if knobs.bn else []
        terms += self.class_terms(answers, labels)
        if adversarial:
            with self._autocast():
                outputs = self.student(shown).float()
            terms.append(knobs.adv * opposition(outputs, answers[0]))
        return sum(terms, start=shown.new_zeros(())), layers

    def teach(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """The student's `kd_steps` on images (n, 3, size, size) in uint8, of the classes `labels` (n,)."""
        self.student.train()
        for value in self._learning:
            value.requires_grad_(True)
        optimiser = self.student_optimiser()
        pool = ImagePool(images, labels, int(torch.randint(2**62, ())), self._augment, self._standardise)
        for _ in range(self._knobs.kd_steps):
            shown, _ = pool.next(self._lesson)
            with torch.no_grad():
                wanted = self._answers(self._network, shown)
            loss = self.disagreement(self._answers(self.student, shown), wanted)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def _answers(self, network: N, shown: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self._autocast():
            return tuple(values.float() for values in self.answers(network, shown))
