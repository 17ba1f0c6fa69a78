"""Images of the classes that a frozen network knows, made from the network alone: what TARGET and LANDER share.

A generator learns over a few steps on each batch of images to minimise

    L(u) = bn R(u) + oh CE(q(u), y) + (a method's own) - adv mean_u [ 1(argmax s(u) = argmax q(u)) KL(q || s) ],

u its images, augmented, y the classes that are requested, q the network's logits, s those of a student, R as in
`Distance`, KL of softmaxes. The batch's images are those of the step with the lowest L. The student learns
from the images made so far, so that new ones are sought where it does not follow the network yet.

R compares a batch's statistics with those of real images that the network's batch norms store. Of every BatchNorm2d l,
(m_l, v_l) are the running mean and variance, (mu_l, s_l) those of the batch at the layer's
input. Images made to bring them together look to the network like those it was trained on (DeepInversion).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import cross_entropy

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augmentation, Standardise
from fcl_bench.errors import UserError
from fcl_bench.methods.data_free.generators.images import ImagePool, N, agreement, opposition, reinitialised

#: The share of the earlier batches in TARGET's and LANDER's averages.
_MOMENTUM = 0.9


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer, per channel (c,): those that it has stored, and those of the batch."""

    target_mean: torch.Tensor
    target_variance: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor


class InputStatistics:
    """Within `with`, looks at the inputs of a network's BatchNorm2d layers during each forward pass.

    Args:
        network: in evaluation mode, so that its running statistics stay.

    Attributes:
        absent: whether the network has no such layer, so that nothing can be compared.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
        self._inputs: dict[nn.Module, torch.Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.absent = not self._layers

    def __enter__(self) -> InputStatistics:
        self._hooks = [layer.register_forward_pre_hook(self._keep) for layer in self._layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._inputs = [], {}

    def layers(self) -> list[LayerStatistics]:
        """Of the last forward pass, differentiable in its images; a variance is that of the batch (divided by n)."""
        found = []
        for layer in self._layers:
            if layer not in self._inputs:
                continue
            inputs = self._inputs.pop(layer)
            mean, variance = moments(inputs.to(torch.promote_types(inputs.dtype, torch.float32)))
            assert layer.running_mean is not None
            assert layer.running_var is not None
            found.append(LayerStatistics(layer.running_mean, layer.running_var, mean, variance))
        return found

    def _keep(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs[layer] = inputs[0]


class _Moments(torch.autograd.Function):
    """Mean and variance of each channel, in a fifth of `torch.var_mean`'s time on a CPU, channels last."""

    @staticmethod
    def forward(ctx: FunctionCtx, maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
        mean = rows.mean(dim=0)
        centred = rows - mean
        ctx.save_for_backward(centred)
        ctx.shape = maps.shape  # type: ignore[attr-defined]
        return mean, centred.square().mean(dim=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, of_mean: torch.Tensor, of_variance: torch.Tensor) -> torch.Tensor:
        [centred] = ctx.saved_tensors  # type: ignore[attr-defined]
        b, c, h, w = ctx.shape  # type: ignore[attr-defined]
        n = len(centred)
        rows = torch.addcmul(of_mean / n, centred, of_variance * (2 / n))
        return rows.view(b, h, w, c).permute(0, 3, 1, 2)


def moments(maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(c,) mean and (c,) variance, divided by n, of `maps` (b, c, h, w) over all but the channels; differentiable."""
    found: tuple[torch.Tensor, torch.Tensor] = _Moments.apply(maps)
    return found


class Distance:
    """TARGET's and LANDER's R = sum_l || v_l - s~_l ||_2 + || m_l - mu~_l ||_2.

    s~ and mu~ average over the batches so far: 0.9 of what they were and 0.1 of the batch's; at first the batch's own.
    """

    def __init__(self) -> None:
        self._averages: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layers: Sequence[LayerStatistics]) -> torch.Tensor:
        """R of a batch; its statistics join the averages as `keep` is called."""
        total = torch.zeros(())
        for layer, (mean, variance) in zip(layers, self._mixed(layers), strict=True):
            total = total.to(mean) + (layer.target_variance - variance).norm() + (layer.target_mean - mean).norm()
        return total

    def keep(self, layers: Sequence[LayerStatistics]) -> None:
        """Take a batch into the averages, without its gradients."""
        self._averages = [(mean.detach(), variance.detach()) for mean, variance in self._mixed(layers)]

    def _mixed(self, layers: Sequence[LayerStatistics]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = [(layer.mean, layer.variance) for layer in layers]
        if not self._averages:
            return own
        share = 1 - _MOMENTUM
        return [
            (_MOMENTUM * before[0] + share * mean, _MOMENTUM * before[1] + share * variance)
            for before, (mean, variance) in zip(self._averages, own, strict=True)
        ]


def divergence(layers: Sequence[LayerStatistics]) -> torch.Tensor:
    """MFCL's R: the mean over layers and channels of log(sqrt(s / v)) - (1 - (v + (m - mu)^2) / s) / 2.

    That is the Kullback-Leibler divergence of a normal law with stored moments from one with the batch's. 0 without
    layers.
    """
    parts = [
        (
            0.5 * (layer.variance / layer.target_variance).log()
            - 0.5 * (1 - (layer.target_variance + (layer.target_mean - layer.mean).square()) / layer.variance)
        ).mean()
        for layer in layers
    ]
    return torch.stack(parts).mean() if parts else torch.zeros(())


#: The decays of Adam's two averages.
BETAS = (0.5, 0.999)


@dataclass
class SynthesisKnobs:
    """The keys of `method.synthesis` that both methods have."""

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
            labels: (b,) the classes that are requested.
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

    def teach(self, images: torch.Tensor) -> None:
        """The student's `kd_steps` on images (n, 3, size, size) in uint8."""
        self.student.train()
        for value in self._learning:
            value.requires_grad_(True)
        optimiser = self.student_optimiser()
        pool = ImagePool(images, int(torch.randint(2**62, ())), self._augment, self._standardise)
        for _ in range(self._knobs.kd_steps):
            shown = pool.next(self._lesson)
            with torch.no_grad():
                wanted = self._answers(self._network, shown)
            loss = self.disagreement(self._answers(self.student, shown), wanted)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def _answers(self, network: N, shown: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self._autocast():
            return tuple(values.float() for values in self.answers(network, shown))
