"""Gradients of single samples, and the images that they reveal (GLFC, LGA).

Who takes it that a gradient reveals its image can skip this file: nothing in it is GLFC's or LGA's own.

A client differentiates one perturbed sample per class over a small network of known weights (`GradientEncoder`). The
server finds the image that has a given gradient, min_x ||gradient(x) - gradient||^2, as in deep leakage from gradients
(Zhu, Liu, Han, NeurIPS 2019), with the label read off first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.func import grad, vmap
from torch.linalg import vecdot
from torch.nn.functional import conv2d, cross_entropy, linear, one_hot

from fcl_bench.environment import exact_kernels
from fcl_bench.protocol import compute
from fcl_bench.tracking.console import progress

#: Filters of every convolution, and their side.
_CHANNELS, _KERNEL = 12, 5
#: From this side on the first convolution steps over 4 pixels, as LGA's code has it for 64 x 64.
_LARGE = 64


def default_strides(side: int) -> tuple[int, ...]:
    """The strides of the three convolutions for images of this (shorter) side."""
    return (4 if side >= _LARGE else 2), 2, 1


@dataclass(frozen=True)
class Factors:
    """Gradients of n samples. That of the linear layer is a product: C + F numbers per sample instead of C F.

    Attributes:
        convolutions: (n, p - C (F + 1)) of all convolutions.
        slopes: (n, C) s = softmax(q) - y, the gradient of the linear layer's bias; that of its weight is s h'.
        features: (n, F) h, what the linear layer takes.
    """

    convolutions: torch.Tensor
    slopes: torch.Tensor
    features: torch.Tensor

    def distances(self, other: Factors) -> torch.Tensor:
        """(n,) the squared distance of each gradient to the other's, all numbers counting alike.

        With e = s - t and f = h - g it is || s h' - t g' ||^2 = |e|^2 |h|^2 + 2 (e't)(h'f) + |t|^2 |f|^2.
        """
        apart, off = self.slopes - other.slopes, self.features - other.features
        crossed = 2 * (apart * other.slopes).sum(dim=1) * (self.features * off).sum(dim=1)
        product = _length(apart) * _length(self.features) + crossed + _length(other.slopes) * _length(off)
        return _length(self.convolutions - other.convolutions) + product + _length(apart)

    def __getitem__(self, which: torch.Tensor) -> Factors:
        return Factors(self.convolutions[which], self.slopes[which], self.features[which])


def _length(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.square().sum(dim=1)


class GradientEncoder:
    """Sigmoid convolutions and a linear layer with a row for each class; nobody ever trains it.

    All weights and biases are uniform in +-1/2, by a seed that both halves know, so that the network never travels. The
    server does not know how many classes the stream will bring. Therefore the linear layer has a row for each class
    seen so far, and a new task appends rows: the rows that an encoder of fewer classes has are the same.

    A gradient is one row of p numbers: each convolution's weights and biases, then those of the linear layer. With 32 x
    32 pixels, three convolutions and C classes p = 8,136 + 769 C; 85,036 for C = 100.

    Args:
        shape: (h, w) of the images, which have 3 channels.
        classes: C.
        seed: of the weights.
        strides: of the convolutions, which are as many; None: three, see `default_strides`.
        dtype, device: in which and where it computes.

    Attributes:
        features: what the linear layer takes: 12 times the pixels of the last convolution's output.
        numbers: p.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        classes: int,
        seed: int,
        strides: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.shape, self.classes = shape, classes
        self._strides = default_strides(min(shape)) if strides is None else strides
        sides = list(shape)
        for stride in self._strides:
            sides = [-(-side // stride) for side in sides]
        self.features = _CHANNELS * math.prod(sides)
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.rand, generator=generator)
        weights: list[torch.Tensor] = []
        for layer in range(len(self._strides)):
            weights += [draw(_CHANNELS, _CHANNELS if layer else 3, _KERNEL, _KERNEL), draw(_CHANNELS)]
        # Row by row, so that a new class leaves the others' rows as they are.
        rows = torch.stack([draw(self.features + 1) for _ in range(classes)])
        weights += [rows[:, :-1].contiguous(), rows[:, -1].contiguous()]
        self._weights = tuple((weight - 0.5).to(device, dtype) for weight in weights)
        self.numbers = sum(weight.numel() for weight in weights)
        self._linear = classes * (self.features + 1)
        self._each = vmap(grad(self._loss, has_aux=True), in_dims=(None, 0, 0))

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        """(n, C) of images (n, 3, h, w) with pixels from 0 to 1."""
        return linear(self._features(self._weights[:-2], images), *self._weights[-2:])

    def gradients(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(n, p): of each sample's cross-entropy over all weights, differentiable in the images.

        Args:
            images: (n, 3, h, w) with pixels from 0 to 1.
            labels: (n,) columns.
        """
        compute.count(trained=len(images))
        found = self.factors(images, labels)
        product = found.slopes[:, :, None] * found.features[:, None]
        return torch.cat([found.convolutions, product.flatten(1), found.slopes], dim=1)

    def factors(self, images: torch.Tensor, labels: torch.Tensor) -> Factors:
        """The same as `gradients`, in factors."""
        if not len(labels):  # which vmap does not take
            empty = images.new_empty
            return Factors(empty(0, self.numbers - self._linear), empty(0, self.classes), empty(0, self.features))
        convolutions, (features, scores) = self._each(self._weights[:-2], images, labels)
        slopes = scores.softmax(dim=1) - one_hot(labels, self.classes)
        return Factors(torch.cat([part.flatten(1) for part in convolutions], dim=1), slopes, features)

    def factorised(self, gradients: torch.Tensor) -> Factors:
        """The factors of gradients (n, p); what rounding adds to them in the linear layer is dropped."""
        convolutions, rows, slopes = self._parts(gradients)
        # If the encoder is sure of a sample, its slopes are near 0; in float64 their squares do not underflow.
        exact = slopes.double()
        lengths = _length(exact).clamp(min=torch.finfo(torch.float64).tiny)
        features = (exact[:, None] @ rows.double()).squeeze(1) / lengths[:, None]
        return Factors(convolutions, slopes, features.to(rows.dtype))

    def labels(self, gradients: torch.Tensor) -> torch.Tensor:
        """(n,) the classes of the samples whose gradients (n, p) these are; exact.

        Row c of the linear layer's gradient is (softmax(q)_c - y_c) h with positive h: only the true class's sum is
        negative.
        """
        return self._parts(gradients)[1].sum(dim=2).argmin(dim=1)

    def _parts(self, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split gradients (n, p) into those of the convolutions (n, .), the weight (n, C, F) and the bias (n, C)."""
        convolutions, rows, slopes = gradients.split(
            [self.numbers - self._linear, self._linear - self.classes, self.classes], dim=1
        )
        return convolutions, rows.unflatten(1, (self.classes, self.features)), slopes

    def _features(self, weights: tuple[torch.Tensor, ...], images: torch.Tensor) -> torch.Tensor:
        for stride, weight, bias in zip(self._strides, weights[::2], weights[1::2], strict=True):
            images = conv2d(images, weight, bias, stride, padding=_KERNEL // 2).sigmoid()
        return images.flatten(1)

    def _loss(
        self, weights: tuple[torch.Tensor, ...], image: torch.Tensor, label: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The cross-entropy as a function of the convolutions' weights; the features and the logits."""
        features = self._features(weights, image[None])
        scores = linear(features, *self._weights[-2:])
        return cross_entropy(scores, label[None]), (features[0], scores[0])


#: x (P, n) -> losses (P,) and their gradients (P, n), each row by itself.
Evaluation = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: Torch's limits: slopes, steps and gains so small end the iterations, and so little curvature is not remembered.
_FLAT, _STILL, _CURVATURE = 1e-7, 1e-9, 1e-10


class BatchedLBFGS:
    """What torch.optim.LBFGS without line search does, for P problems in n unknowns at a time.

    A problem whose loss stops being finite goes back to its last finite point and stays there.

    Args:
        x: (P, n) where to begin.
        evaluate: the losses and gradients of all problems.
        rate: of every step; the first one is divided by |gradient|_1 where that is above 1.
        history: how many steps are remembered.

    Attributes:
        x: (P, n) where the problems are.
        lost: (P,) which of them met a loss that is not finite.
    """

    def __init__(self, x: torch.Tensor, evaluate: Evaluation, rate: float, history: int = 100) -> None:
        self.x = x.clone()
        self.lost = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self._evaluate, self._rate, self._history = evaluate, rate, history
        #: Newest last: each problem's step s, the change y of its slope, and 1/(y's), 0 where it did not remember one.
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        #: y's / y'y of the last pair.
        self._scale = x.new_ones(len(x))
        self._begun = torch.zeros_like(self.lost)
        self._step, self._slope = torch.zeros_like(x), torch.zeros_like(x)
        self._safe, self._safe_loss = self.x, x.new_full((len(x),), torch.inf)

    def iterate(self, iterations: int) -> torch.Tensor:
        """Iterate every problem, fewer times if it gains nothing more. Returns the losses (P,) before that."""
        first, slope = self._look(self.x)
        losses = first
        going = ~self.lost & (slope.abs().amax(dim=1) > _FLAT)
        for left in range(iterations - 1, -1, -1):
            if not bool(going.any()):
                break
            direction = self._direction(slope, going)
            # The very first step follows the slope itself, whose length means nothing.
            size = torch.where(self._begun, 1.0, (1 / slope.abs().sum(dim=1)).clamp(max=1.0)) * self._rate
            step = size[:, None] * direction
            self._step = torch.where(going[:, None], step, self._step)
            self._slope = torch.where(going[:, None], slope, self._slope)
            self._begun = self._begun | going
            going = going & (vecdot(slope, direction) <= -_STILL)
            self.x = torch.where(going[:, None], self.x + step, self.x)
            if left and bool(going.any()):
                before = losses
                losses, slope = self._look(self.x)
                gained = (losses - before).abs() >= _STILL
                moved = step.abs().amax(dim=1) > _STILL
                going = going & ~self.lost & gained & moved & (slope.abs().amax(dim=1) > _FLAT)
        return first

    def _look(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and slopes; lost problems stay at their last safe point."""
        losses, slopes = self._evaluate(x)
        self.lost = self.lost | ~(losses.isfinite() & slopes.isfinite().all(dim=1) & x.isfinite().all(dim=1))
        self.x = self._safe = torch.where(self.lost[:, None], self._safe, x)
        self._safe_loss = torch.where(self.lost, self._safe_loss, losses)
        return self._safe_loss, slopes.masked_fill(self.lost[:, None], 0.0)

    def _direction(self, slope: torch.Tensor, going: torch.Tensor) -> torch.Tensor:
        """(P, n) minus the slope times the inverse Hessian that the history tells of."""
        change = slope - self._slope
        curvature = vecdot(change, self._step)
        new = going & self._begun & (curvature > _CURVATURE)
        if bool(new.any()):
            # Pairs that are not remembered are all zeros, since a rho of 0 would not remove an infinity.
            weight = torch.where(new, 1 / curvature, 0.0)
            pair = (self._step * new[:, None], change * new[:, None], weight)
            self._pairs = [*self._pairs[len(self._pairs) == self._history :], pair]
            self._scale = torch.where(new, curvature / vecdot(change, change), self._scale)
        found, shares = -slope, []
        for step, change, weight in reversed(self._pairs):
            share = weight * vecdot(step, found)
            found = found - share[:, None] * change
            shares.append(share)
        found = found * self._scale[:, None]
        for (step, change, weight), share in zip(self._pairs, reversed(shares), strict=True):
            found = found + (share - weight * vecdot(change, found))[:, None] * step
        return found


#: The most numbers in the history of the problems that run at a time.
_ROOM = 2**26
#: Iterations from image to image, as in a step of torch's L-BFGS.
INNER = 20


@dataclass(frozen=True)
class Reconstruction:
    """What P gradients reveal.

    Attributes:
        images: (P, last, 3, h, w) the last iterates, the final one at the end; pixels may leave 0..1.
        labels: (P,) columns.
        losses: (P,) || gradient(x) - gradient ||^2 at the final one.
    """

    images: torch.Tensor
    labels: torch.Tensor
    losses: torch.Tensor


def reconstruct(
    encoder: GradientEncoder,
    gradients: torch.Tensor,
    seed: int,
    rate: float,
    iterations: int = 250,
    last: int = 20,
    inner: int = INNER,
) -> Reconstruction:
    """Minimise the distance of gradients by L-BFGS from a normal random image, for each gradient alone.

    Args:
        encoder: over which the samples were differentiated.
        gradients: (P, p).
        seed: of the random images.
        rate: step size; GLFC's code has 0.1, FedProTIP's runs of it 0.5 and 0.1.
        iterations: images that are looked at, one after the other.
        last: how many of them are returned.
        inner: iterations of L-BFGS from one image to the next.
    """
    height, width = encoder.shape
    labels = encoder.labels(gradients)
    if not len(gradients):
        return Reconstruction(gradients.new_empty(0, last, 3, height, width), labels, gradients.new_empty(0))
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn((len(gradients), 3 * height * width), generator=generator, dtype=torch.float64).to(gradients)
    history = min(100, iterations * inner)
    at_once = max(1, _ROOM // (2 * history * start.shape[1]))
    wanted = encoder.factorised(gradients)

    def evaluate(chosen: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        compute.count(steps=len(x), trained=len(x))
        with torch.enable_grad(), exact_kernels():
            x = x.detach().requires_grad_()
            found = encoder.factors(x.unflatten(1, (3, height, width)), labels[chosen])
            distances = found.distances(wanted[chosen])
            (slopes,) = torch.autograd.grad(distances.sum(), x)
        return distances.detach(), slopes

    groups = torch.arange(len(gradients), device=gradients.device).split(at_once)
    images, losses = [], []
    with progress(len(groups) * iterations, f"reconstructing {len(gradients)} images", "step") as bar:
        for chosen in groups:
            solver, iterates = BatchedLBFGS(start[chosen], partial(evaluate, chosen), rate), []
            for iteration in range(iterations):
                solver.iterate(inner)
                bar.update()
                if iteration >= iterations - last:
                    iterates.append(solver.x)
            losses.append(solver.iterate(0))
            # The final point may be one that was never looked at.
            iterates[-1] = solver.x
            images.append(torch.stack(iterates, dim=1).unflatten(2, (3, height, width)))
    return Reconstruction(torch.cat(images), labels, torch.cat(losses))


def pixel_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Images in uint8: pixels outside 0..1 are cut off."""
    return (pixels.detach().double() * 255).clamp(0, 255).round().to(torch.uint8)
