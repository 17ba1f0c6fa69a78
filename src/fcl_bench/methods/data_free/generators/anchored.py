"""Anchors, and images of the classes that a frozen network knows, made of them (LANDER; Tran et al., CVPR 2024).

An anchor is a point for every class to which the mapped features of its samples are drawn.

A generator G learns over a few steps of Adam on each batch to minimise L of `generators.synthesis`, with a term more,

    ltc B(A phi(u), e_y),

u = G(e_y), e_y the anchors of the classes y that are requested, phi and A the network's features and mapping, B as in
`outside`. G begins with linear layers whose weights are drawn anew for each batch: they are the noise. The
student learns the mapped features, too.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss, pad

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augmentation, Standardise
from fcl_bench.errors import UserError, first_line
from fcl_bench.files import special, user_path
from fcl_bench.methods.data_free.generators.images import ImageGenerator, to_bytes
from fcl_bench.methods.data_free.generators.synthesis import BETAS, Inversion, SynthesisKnobs
from fcl_bench.randomness import seeded
from fcl_bench.training.network import Network

#: Root mean square of the entries of random anchors. Two of them are then as far apart, as a mean over entries, as two
#: of the text embeddings in LANDER's repository (CLIP, CIFAR-100): of those, less their mean, it is 0.200.
SPREAD = 0.2

#: The matrix in a file of anchors.
_ROWS = "anchors"
_SUFFIXES = (".npz", ".safetensors")


class MappedNetwork(Network):
    """A network with a mapping A of its features to the space of the anchors.

    Args:
        start: the body in its initial weights.
        size: d_e, of an anchor.
        seed: of the mapping's first weights, which are torch's own for a linear layer.
    """

    def __init__(self, start: Trainable, size: int, seed: int) -> None:
        super().__init__(start)
        with seeded(seed):
            self.mapping = nn.Linear(self.dimension, size)


def outside(points: torch.Tensor, anchors: torch.Tensor, radius: float) -> torch.Tensor:
    """LANDER's bounding loss B = relu(mse(a, e) - r): how far a batch is outside of the balls around its anchors.

    Args:
        points: (b, d_e) mapped features.
        anchors: (b, d_e) of their classes.
        radius: r, on the scale of the mean over samples and entries.
    """
    return torch.relu(mse_loss(points, anchors.to(points)) - radius)


def random_anchors(columns: range, size: int, seed: int) -> torch.Tensor:
    """(c, size) anchors of the classes of `columns`; a class has the same one whichever others are requested.

    Those of columns 0 to size - 1 are orthogonal to each other, those of the next `size` columns again, and so on; all
    have the length 0.2 sqrt(size).
    """
    blocks = {column // size for column in columns}
    frames = {block: _frame(size, seed + block) for block in blocks}
    rows = [frames[column // size][column % size] for column in columns]
    return SPREAD * size**0.5 * torch.stack(rows).float() if rows else torch.zeros(0, size)


def _frame(size: int, seed: int) -> torch.Tensor:
    """(size, size) a random rotation or reflection, in float64."""
    drawn = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(drawn)
    return q * r.diagonal().sign()


def read_anchors(path: str, key: str) -> torch.Tensor:
    """(C, d_e) in float32, row by row for the data set's classes 0, 1, ...: the matrix `anchors` of the file.

    Args:
        path: of the file.
        key: where the user set it, for messages.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    where, wanted = f"{key}={path}", "random, or a .npz or .safetensors file with a matrix `anchors`"
    file = user_path(key, path)
    if file.suffix not in _SUFFIXES:
        raise UserError(f"{where} is no file of anchors", wanted)
    if not file.is_file():
        found = special(file)
        raise UserError(f"{where} {f'is {found}' if found else 'does not exist'}", wanted)
    try:
        held = _tensors(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{where} can't be read: {first_line(error)}", wanted) from error
    rows = held.get(_ROWS, torch.empty(0))
    if rows.ndim != 2 or not rows.numel() or not rows.is_floating_point() or not bool(torch.isfinite(rows).all()):
        described = ", ".join(f"{name} {tuple(value.shape)}" for name, value in list(held.items())[:3]) or "nothing"
        raise UserError(f"{where} holds no matrix of finite numbers: {described}", wanted)
    return rows.float()


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            return {name: torch.from_numpy(archive[name]) for name in archive.files}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(first_line(error)) from error


#: Samples that one noisy layer serves.
_SERVED = 10
#: The first values of the learnt mean and deviation of pixels, and their step size.
_MEAN, _STD, _PIXEL_RATE = 0.5, 0.2, 0.01
#: Step size, momentum and weight decay of the student's SGD.
_STUDENT_RATE, _STUDENT_MOMENTUM, _STUDENT_DECAY = 0.1, 0.9, 2e-4


@dataclass
class Synthesis(SynthesisKnobs):
    """`method.synthesis`: how the server makes images of earlier classes, see conf/method/lander.yaml."""

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
