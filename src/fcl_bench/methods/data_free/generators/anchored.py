"""Images of the classes that a frozen network knows, made of their anchors (LANDER; Tran et al., CVPR 2024).

A generator G learns over a few steps of Adam on each batch to minimise L of `generators.synthesis`, with a term more,

    ltc B(A phi(u), e_y),

u = G(e_y), e_y the anchors of the classes y that are requested, phi and A the network's features and mapping, B as in
`anchors.outside`. G begins with linear layers whose weights are drawn anew for each batch: they are the noise. The
student learns the mapped features, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss, pad

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augmentation, Standardise
from fcl_bench.methods.data_free.generators.anchors import MappedNetwork, outside
from fcl_bench.methods.data_free.generators.images import ImageGenerator, to_bytes
from fcl_bench.methods.data_free.generators.synthesis import BETAS, Inversion, SynthesisKnobs

#: Samples that one noisy layer serves.
_SERVED = 10
#: The first values of the learnt mean and deviation of pixels, and their step size.
_MEAN, _STD, _PIXEL_RATE = 0.5, 0.2, 0.01
#: Step size, momentum and weight decay of the student's SGD.
_STUDENT_RATE, _STUDENT_MOMENTUM, _STUDENT_DECAY = 0.1, 0.9, 2e-4


@dataclass
class Synthesis(SynthesisKnobs):
    """`method.synthesis`: how the server makes images of earlier classes.

    Args:
        images: how many of the retained images are used; all, if there are fewer.
        warmup, batches: of the `warmup` + `batches` batches, those from number `warmup` (from 1) on are stored.
        noise: numbers of which an image is made, behind the noisy layers.
        kd_steps: of the student after each batch that is stored.
    """

    images: int = knob(10000, least=1)
    warmup: int = knob(10, least=0)
    batches: int = knob(40, least=1)
    g_steps: int = knob(40, least=1)

    @property
    def numbers(self) -> range:
        """The numbers of all batches."""
        return range(1, self.warmup + self.batches + 1)

    def keeps(self, number: int) -> bool:
        """Whether the batch of this number is stored."""
        return number >= self.warmup

    def opposes(self, number: int) -> bool:
        """Whether the student plays a part in the batch of this number: by then it has seen three batches."""
        return self.adv > 0 and number > self.warmup + 2

    @property
    def stored(self) -> int:
        """Images of all batches that are stored."""
        return self.batch * sum(map(self.keeps, self.numbers))


class NoisyLayers(nn.Module):
    """Linear layers (d_e to inputs) of which each serves 10 rows of a batch; their random weights are the noise.

    Args:
        count: rows of a batch at most.
        size: d_e.
        outputs: of each.
    """

    def __init__(self, count: int, size: int, outputs: int) -> None:
        super().__init__()
        layers = -(-count // _SERVED)
        self.weight = nn.Parameter(torch.zeros(layers, size, outputs))
        self.bias = nn.Parameter(torch.zeros(layers, 1, outputs))

    @torch.no_grad()
    def renew(self) -> None:
        """Draw the weights from N(0, 1), by torch's own generator; biases are 0."""
        self.weight.copy_(torch.randn(self.weight.shape))
        self.bias.zero_()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(b, outputs) of (b, d_e): the first layer's of the first 10 rows, and so on."""
        layers, size, outputs = self.weight.shape
        whole = pad(rows, (0, 0, 0, layers * _SERVED - len(rows)))
        served = torch.baddbmm(self.bias, whole.view(layers, _SERVED, size), self.weight)
        return served.reshape(-1, outputs)[: len(rows)]


class AnchoredGenerator(nn.Module):
    """Anchors (b, d_e) to images (b, 3, side, side) from 0 to 1: batch norm, noisy layers, `ImageGenerator`.

    Args:
        size: d_e.
        inputs: of the `ImageGenerator`.
        side: of the square images.
        count: images of a batch at most.
    """

    def __init__(self, size: int, inputs: int, side: int, count: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)
        self.noisy = NoisyLayers(count, size, inputs)
        self.images = ImageGenerator(inputs, side)

    def forward(self, anchors: torch.Tensor) -> torch.Tensor:
        """Images of these anchors; they differ from each other within a batch by their layer and by their anchor."""
        made: torch.Tensor = self.images(self.noisy(self.norm(anchors)))
        return made


def balanced(count: int, classes: int) -> torch.Tensor:
    """(count,) columns: 0 to classes - 1 again and again, and random ones for the remainder."""
    whole = torch.arange(classes).repeat(count // classes)
    return torch.cat([whole, torch.randint(classes, (count % classes,))])


class AnchoredInversion(Inversion[MappedNetwork]):
    """Makes images of one network (see `Inversion`).

    Args:
        knobs, network, standardise, augment, lesson, autocast: see `Inversion`.
        anchors: (C, d_e) of the classes that the network knows.
        pull, radius: of the bounding loss: its weight, also for the student's mapped features, and r.

    Attributes:
        generator: as it has learnt so far.
        mean, std: (1, 3, 1, 1) what the generator's images are standardised by; they learn with it.
    """

    _knobs: Synthesis

    def __init__(
        self,
        knobs: Synthesis,
        network: MappedNetwork,
        anchors: torch.Tensor,
        pull: float,
        radius: float,
        standardise: Standardise,
        augment: Augmentation,
        lesson: int,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._anchors, self._pull, self._radius = anchors, pull, radius
        generator = AnchoredGenerator(anchors.shape[1], knobs.noise, standardise.size, knobs.batch)
        self.generator = generator.to(anchors.device)
        super().__init__(knobs, network, standardise, augment, lesson, autocast)
        self.mean, self.std = (torch.full((1, 3, 1, 1), value, device=anchors.device) for value in (_MEAN, _STD))

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All batches: the images (n, 3, size, size) in uint8 that are stored, and their columns (n,)."""
        knobs = self._knobs
        made: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for number in knobs.numbers:
            labels = balanced(knobs.batch, len(self._anchors)).to(self._anchors.device)
            images = to_bytes(self.batch(labels, knobs.opposes(number)))
            if knobs.keeps(number):
                made.append(images)
                wanted.append(labels)
                self.teach(torch.cat(made)[: knobs.images])
        return torch.cat(made), torch.cat(wanted)

    def batch(self, labels: torch.Tensor, adversarial: bool) -> torch.Tensor:
        """Images (b, 3, size, size) from 0 to 1 of the columns `labels` (b,); the generator learns further.

        Raises:
            UserError: the loss was never finite.
        """
        self.generator.train().noisy.renew()
        pixels = [value.requires_grad_() for value in (self.mean, self.std)]
        made_of: list[dict[str, Any]] = [
            {"params": [*self.generator.parameters()]},
            {"params": pixels, "lr": _PIXEL_RATE},
        ]
        optimiser = torch.optim.Adam(made_of, lr=self._knobs.lr_g, betas=BETAS)
        anchors = self._anchors[labels]
        return self.descend(lambda: self.generator(anchors), optimiser, labels, adversarial)

    def standardised(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise by the learnt mean and deviation."""
        return (images - self.mean) / self.std

    def answers(self, network: MappedNetwork, shown: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits, and mapped features (b, d_e)."""
        features = network.body(shown)
        return network.logits(features), network.mapping(features)

    def class_terms(self, answers: tuple[torch.Tensor, ...], labels: torch.Tensor) -> list[torch.Tensor]:
        """The terms of `Inversion` and ltc B(A phi(u), e_y)."""
        terms = super().class_terms(answers, labels)
        if self._pull:
            terms.append(self._pull * outside(answers[1], self._anchors[labels], self._radius))
        return terms

    def disagreement(self, outputs: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The loss of `Inversion` and ltc mse(A)."""
        loss = super().disagreement(outputs, wanted)
        return loss + self._pull * mse_loss(outputs[1], wanted[1]) if self._pull else loss

    def student_optimiser(self) -> torch.optim.Optimizer:
        """A new one for each lesson."""
        return torch.optim.SGD(
            self._learning, lr=_STUDENT_RATE, momentum=_STUDENT_MOMENTUM, weight_decay=_STUDENT_DECAY
        )

    def teach(self, images: torch.Tensor) -> None:
        """Do as in `Inversion`; a student that plays no part learns nothing."""
        if self._knobs.kd_steps and self._knobs.adv:
            super().teach(images)
