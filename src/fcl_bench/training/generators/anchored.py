"""Images of the classes that a frozen network knows, made of their anchors (LANDER; Tran et al., CVPR 2024).

A generator G learns over a few steps of Adam on each batch to minimise

    L(u) = bn R(u) + oh CE(q(u), y) + ltc B(A phi(u), e_y) - adv mean_u [ 1(argmax s(u) = argmax q(u)) KL(q || s) ],

u = G(e_y) augmented, y the classes that are asked for and e_y their anchors, q, phi and A the network's logits,
features and mapping, s the logits of a student, R as in `batch_norm.Distance`, B as in `anchors.outside`. The batch's
images are those of the step with the lowest L. G begins with linear layers whose weights are drawn anew for each batch:
they are the noise. The student learns from the images made so far.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Standardise
from fcl_bench.errors import UserError
from fcl_bench.training.anchors import MappedNetwork, outside
from fcl_bench.training.generators.batch_norm import Distance, InputStatistics, LayerStatistics
from fcl_bench.training.generators.images import ImageGenerator, to_bytes
from fcl_bench.training.generators.replay import ImagePool
from fcl_bench.training.generators.student import agreement, opposition, reinitialised
from fcl_bench.training.samples import Augmentation

#: Samples that one noisy layer serves.
_SERVED = 10
#: Of Adam's two averages.
_BETAS = (0.5, 0.999)
#: The learnt mean and deviation of pixels at first, and their step size.
_MEAN, _STD, _PIXEL_RATE = 0.5, 0.2, 0.01
#: Of the student's SGD: step size, momentum, weight decay.
_STUDENT_RATE, _STUDENT_MOMENTUM, _STUDENT_DECAY = 0.1, 0.9, 2e-4


@dataclass
class Synthesis:
    """`method.synthesis`: how the server makes images of earlier classes.

    Args:
        images: so many of the images that are kept are used, or all where there are fewer.
        batch: images made together.
        warmup, batches: of the `warmup` + `batches` batches, those from number `warmup` (from 1) on are kept.
        noise: numbers of which an image is made, behind the noisy layers.
        g_steps, lr_g: of Adam, on each batch.
        bn, oh, adv: weights of R, of the cross-entropy, and of the disagreement with the student; 0: without.
        kd_steps: of the student after each batch that is kept.
        temperature: T of the student's loss.
    """

    images: int = knob(10000, least=1)
    batch: int = knob(256, least=2)
    warmup: int = knob(10, least=0)
    batches: int = knob(40, least=1)
    noise: int = knob(256, least=1)
    g_steps: int = knob(40, least=1)
    lr_g: float = knob(2e-3, above=0)
    bn: float = knob(1.0, least=0)
    oh: float = knob(0.5, least=0)
    adv: float = knob(1.0, least=0)
    kd_steps: int = knob(50, least=0)
    temperature: float = knob(20.0, above=0)

    @property
    def numbers(self) -> range:
        """Of all batches."""
        return range(1, self.warmup + self.batches + 1)

    def keeps(self, number: int) -> bool:
        """Whether the batch of this number is kept."""
        return number >= self.warmup

    def opposes(self, number: int) -> bool:
        """Whether the student plays a part in the batch of this number: by then it has seen three batches."""
        return self.adv > 0 and number > self.warmup + 2

    @property
    def kept(self) -> int:
        """Images of all batches that are kept."""
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

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and running statistics but for the noise, which is drawn anew."""
        return {
            name: value
            for name, value in self.state_dict().items()
            if value.is_floating_point() and not name.startswith("noisy.")
        }

    @torch.no_grad()
    def load(self, values: dict[str, torch.Tensor]) -> None:
        """Take over what `state` returned."""
        own = self.state()
        for name, value in values.items():
            own[name].copy_(value)


def balanced(count: int, classes: int) -> torch.Tensor:
    """(count,) columns: 0 to classes - 1 again and again, and for what is left random ones."""
    whole = torch.arange(classes).repeat(count // classes)
    return torch.cat([whole, torch.randint(classes, (count % classes,))])


@torch.no_grad()
def drawn_images(
    generator: AnchoredGenerator, values: dict[str, torch.Tensor], anchors: torch.Tensor, knobs: Synthesis
) -> tuple[torch.Tensor, torch.Tensor]:
    """As many images in uint8 as `AnchoredInversion` keeps and uses, with their columns, by a generator that was sent.

    Args:
        generator: any; takes over `values`.
        values: its `state`.
        anchors: (C, d_e) of the classes.
        knobs: how many.
    """
    generator.load(values)
    generator.train()  # as it made images when it learnt; batch norm by running statistics gives other ones
    wanted = min(knobs.images, knobs.kept)
    images, labels = [], []
    for _ in range(-(-wanted // knobs.batch)):
        targets = balanced(knobs.batch, len(anchors)).to(anchors.device)
        generator.noisy.renew()
        images.append(to_bytes(generator(anchors[targets])))
        labels.append(targets)
    return torch.cat(images)[:wanted], torch.cat(labels)[:wanted]


class AnchoredInversion:
    """Makes images of one network. Every draw is of torch's own generators, so whoever makes one seeds those.

    Args:
        knobs: see `Synthesis`.
        network: the teacher, in evaluation mode, without gradients of its weights.
        anchors: (C, d_e) of the classes that it knows.
        pull, radius: of the bounding loss: its weight, also for the student's mapped features, and r.
        standardise: from images to what clients' networks see.
        augment: what happens to images before a network sees them.
        lesson: images in a step of the student.
        autocast: the precision of forward passes.

    Attributes:
        generator, student: as they have learnt so far.
        mean, std: (1, 3, 1, 1) what the generator's images are standardised by; they learn with it.
    """

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
        self._knobs, self._network, self._anchors = knobs, network, anchors
        self._pull, self._radius, self._lesson = pull, radius, lesson
        self._standardise, self._augment, self._autocast = standardise, augment, autocast
        self._device = anchors.device
        self.generator = AnchoredGenerator(anchors.shape[1], knobs.noise, standardise.size, knobs.batch).to(
            self._device
        )
        student = reinitialised(network)
        assert isinstance(student, MappedNetwork)
        self.student = student
        #: What of it learns.
        self._learning = [value for value in student.parameters() if value.requires_grad]
        self.mean, self.std = (torch.full((1, 3, 1, 1), value, device=self._device) for value in (_MEAN, _STD))
        self._distance = Distance()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All batches: the images (n, 3, size, size) in uint8 that are kept, and their columns (n,)."""
        knobs = self._knobs
        made: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for number in knobs.numbers:
            labels = balanced(knobs.batch, len(self._anchors)).to(self._device)
            images = to_bytes(self.batch(labels, knobs.opposes(number)))
            if knobs.keeps(number):
                made.append(images)
                wanted.append(labels)
                self.teach(torch.cat(made)[: knobs.images], torch.cat(wanted)[: knobs.images])
        return torch.cat(made), torch.cat(wanted)

    def batch(self, labels: torch.Tensor, adversarial: bool) -> torch.Tensor:
        """Images (b, 3, size, size) from 0 to 1 of the columns `labels` (b,): of all steps those of the lowest loss.

        Raises:
            UserError: the loss was never finite.
        """
        knobs = self._knobs
        self.generator.train().noisy.renew()
        self.student.eval().requires_grad_(False)
        pixels = [value.requires_grad_() for value in (self.mean, self.std)]
        groups = [{"params": [*self.generator.parameters()], "lr": knobs.lr_g}, {"params": pixels, "lr": _PIXEL_RATE}]
        optimiser = torch.optim.Adam(groups, betas=_BETAS)
        anchors = self._anchors[labels]
        best, lowest = torch.empty(0), torch.tensor(torch.inf, device=self._device)
        layers: list[LayerStatistics] = []
        for step in range(knobs.g_steps):
            with self._autocast():
                images = self.generator(anchors).float()
            loss, layers = self.loss(images, labels, adversarial)
            value, here = loss.detach(), images.detach()
            # Without a look at the loss, for which a GPU would have to be waited for.
            best = torch.where(value < lowest, here, best) if step else here
            lowest = torch.where(value < lowest, value, lowest)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        self._distance.keep(layers)
        if not bool(torch.isfinite(lowest)):
            raise UserError(
                f"method.synthesis.lr_g={knobs.lr_g:g}: no image has a finite loss", "a smaller method.synthesis.lr_g"
            )
        return best

    def loss(
        self, images: torch.Tensor, labels: torch.Tensor, adversarial: bool
    ) -> tuple[torch.Tensor, list[LayerStatistics]]:
        """bn R + oh CE + ltc B(A phi(u), e_y) + adv opposition, and what batch norms saw; a weight of 0 is skipped.

        Args:
            images: (b, 3, size, size) from 0 to 1, before augmentation.
            labels: (b,).
            adversarial: whether the student plays a part.
        """
        knobs = self._knobs
        shown = (self._augment(images, torch.default_generator) - self.mean) / self.std
        loss = shown.new_zeros(())
        with InputStatistics(self._network) as statistics:
            with self._autocast():
                features = self._network.body(shown)
                scores, mapped = self._network.logits(features).float(), self._network.mapping(features).float()
            layers = statistics.layers()
        if knobs.bn:
            loss = loss + knobs.bn * self._distance(layers)
        if knobs.oh:
            loss = loss + knobs.oh * cross_entropy(scores, labels)
        if self._pull:
            loss = loss + self._pull * outside(mapped, self._anchors[labels], self._radius)
        if adversarial:
            with self._autocast():
                said = self.student(shown).float()
            loss = loss + knobs.adv * opposition(said, scores)
        return loss, layers

    def teach(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """The student's steps on images (n, 3, size, size) in uint8, on the teacher's logits and mapped features."""
        knobs = self._knobs
        if not (knobs.kd_steps and knobs.adv):
            return
        pool = ImagePool(images, labels, int(torch.randint(2**62, ())), self._augment, self._standardise)
        optimiser = torch.optim.SGD(
            self._learning,
            lr=_STUDENT_RATE,
            momentum=_STUDENT_MOMENTUM,
            weight_decay=_STUDENT_DECAY,
        )
        self.student.train()
        for value in self._learning:
            value.requires_grad_(True)
        for _ in range(knobs.kd_steps):
            shown, _ = pool.next(self._lesson)
            with self._autocast():
                with torch.no_grad():
                    known = self._network.body(shown)
                    wanted, target = self._network.logits(known).float(), self._network.mapping(known).float()
                features = self.student.body(shown)
                said, mapped = self.student.logits(features).float(), self.student.mapping(features).float()
            loss = agreement(said, wanted, knobs.temperature).mean()
            if self._pull:
                loss = loss + self._pull * mse_loss(mapped, target)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
