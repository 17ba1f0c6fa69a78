"""TARGET's making of images, step by step from the equations: Adam and SGD by hand, gradients by autograd."""

from __future__ import annotations

import copy

import torch
from torch import nn

#: Parameters, and Adam's averages of each.
Moments = dict[str, tuple[torch.Tensor, torch.Tensor]]


def adam(values: dict, gradients: dict, moments: Moments, step: int, rate: float) -> None:
    """The `step`-th step (from 1) of Adam with betas 0.5 and 0.999, in place."""
    for name, gradient in gradients.items():
        m, v = moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
        m, v = 0.5 * m + 0.5 * gradient, 0.999 * v + 0.001 * gradient**2
        moments[name] = m, v
        values[name].data -= rate * (m / (1 - 0.5**step)) / ((v / (1 - 0.999**step)) ** 0.5 + 1e-8)


class PlainInversion:
    """The same as `MetaInversion`, of networks of one forward pass and without augmentation."""

    def __init__(self, knobs, generator: nn.Module, teacher: nn.Module, student: nn.Module, standardise) -> None:
        self.knobs, self.teacher, self.standardise = knobs, teacher, standardise
        self.generator, self.student = copy.deepcopy(generator), copy.deepcopy(student)
        self.moments: Moments = {}
        self.batches = 0
        self.averages: list[tuple[torch.Tensor, torch.Tensor]] = []

    def statistics(self, shown: torch.Tensor) -> list[tuple[nn.BatchNorm2d, torch.Tensor, torch.Tensor]]:
        """Each batch norm of the teacher with the mean and variance of its inputs."""
        found, x = [], shown
        for module in (part for stage in list(self.teacher.body)[:4] for part in stage):
            if isinstance(module, nn.BatchNorm2d):
                centred = x - x.mean(dim=(0, 2, 3), keepdim=True)
                found.append((module, x.mean(dim=(0, 2, 3)), (centred**2).mean(dim=(0, 2, 3))))
            x = module(x.clone())  # ReLU works in place
        return found

    def loss(self, images: torch.Tensor, labels: torch.Tensor, adversarial: bool):
        shown, knobs = self.standardise(images), self.knobs
        q, found = self.teacher(shown), self.statistics(shown)
        mixed = [(m, v) for _, m, v in found]
        if self.averages:
            mixed = [
                (0.9 * a + 0.1 * m, 0.9 * b + 0.1 * v) for (a, b), (m, v) in zip(self.averages, mixed, strict=True)
            ]
        R = sum(
            ((norm.running_var - v) ** 2).sum() ** 0.5 + ((norm.running_mean - m) ** 2).sum() ** 0.5
            for (norm, _, _), (m, v) in zip(found, mixed, strict=True)
        )
        log_q = q - q.logsumexp(dim=1, keepdim=True)
        total = knobs.bn * R - knobs.oh * log_q[torch.arange(len(labels)), labels].mean()
        if adversarial:
            s = self.student(shown)
            log_s = s - s.logsumexp(dim=1, keepdim=True)
            same = (s.argmax(dim=1) == q.argmax(dim=1)).double()
            total = total - knobs.adv * (same * (log_q.exp() * (log_q - log_s)).sum(dim=1)).mean()
        return total, [(m.detach(), v.detach()) for m, v in mixed]

    def batch(self, noise: torch.Tensor, labels: torch.Tensor, adversarial: bool) -> torch.Tensor:
        knobs = self.knobs
        self.student.eval()
        inner, z = copy.deepcopy(self.generator), noise.clone().requires_grad_()
        values = {**dict(inner.named_parameters()), "z": z}
        totals = {name: torch.zeros_like(value) for name, value in self.generator.named_parameters()}
        moments: Moments = {}
        losses, made, mixed = [], [], []
        for step in range(1, knobs.g_steps + 1):
            images = inner(z)
            loss, mixed = self.loss(images, labels, adversarial)
            found = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))
            losses.append(float(loss.detach()))
            made.append(images.detach())
            for name in totals:
                totals[name] += found[name]
            adam(values, {"z": found.pop("z")}, moments, step, knobs.lr_z)
            adam(values, found, moments, step, knobs.lr_g)
        self.averages = mixed
        own = dict(self.generator.named_parameters())
        if knobs.meta == "reptile":
            totals = {name: 67 * (own[name].data - values[name].data) for name in own}
        self.batches += 1
        adam(own, totals, self.moments, self.batches, knobs.lr_g * knobs.g_steps)
        return made[losses.index(min(losses))]
