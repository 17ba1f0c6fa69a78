"""One client's statistics of one task: class sums, and deviations from class means with their leading directions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fcl_bench.linalg.gram import class_sums
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.centred_sketch import deviations

Tensor = torch.Tensor


@dataclass
class Deviations:
    """A (n, M), the rows less their class mean, and what is asked of it.

    Attributes:
        A: (n, M).
        most: directions that are found at most.
    """

    A: Tensor
    most: int

    @cached_property
    def energy(self) -> float:
        return float(self.A.square().sum())

    @cached_property
    def top(self) -> Spectrum:
        return summarise(self.A, min(self.most, self.A.shape[1]))[0]


@dataclass
class Local:
    """What one client has of one task, before anything is rounded.

    Attributes:
        which: (n,) class of each sample, 0 to c - 1.
        n: (c,) counts.
        S, S_z: (M, c), (d, c) class sums of random and of backbone features.
        hidden, inputs: deviations of both.
        means, sizes, group: (d, j), (j,), (j,) of its Gaussians: means of backbone features, samples, class.
    """

    which: Tensor
    n: Tensor
    S: Tensor
    S_z: Tensor
    hidden: Deviations
    inputs: Deviations
    means: Tensor
    sizes: Tensor
    group: Tensor

    @classmethod
    def of(cls, Z: Tensor, H: Tensor, which: Tensor, classes: int, most: int, most_inputs: int) -> Local:
        n = torch.bincount(which, minlength=classes).to(H)
        S, S_z = class_sums(H, which, classes), class_sums(Z, which, classes)
        hidden, inputs = Deviations(deviations(H, which, S), most), Deviations(deviations(Z, which, S_z), most_inputs)
        return cls(which, n, S, S_z, hidden, inputs, S_z / n.clamp_min(1), n, torch.arange(classes))

    def centred(self, S: Tensor, S_z: Tensor, n: Tensor) -> Local:
        """The same with the deviations from the means S / n, S_z / n of others."""
        moved = [
            Deviations(old.A + (own / self.n.clamp_min(1) - total / n.clamp_min(1)).T[self.which], old.most)
            for old, own, total in ((self.hidden, self.S, S), (self.inputs, self.S_z, S_z))
        ]
        return replace(self, hidden=moved[0], inputs=moved[1])

    def clustered(self) -> Local:
        """Two Gaussians per class, by k-means within the class; the first cut is across the leading direction."""
        A, classes = self.inputs.A, len(self.n)
        part = (A @ self.inputs.top.V[:, 0] > 0).long()
        for _ in range(10):
            code = 2 * self.which + part
            size = torch.bincount(code, minlength=2 * classes).to(A)
            means = class_sums(A, code, 2 * classes) / size.clamp_min(1)
            distance = torch.stack([(A - means.T[2 * self.which + i]).square().sum(1) for i in (0, 1)])
            distance[torch.stack([size[2 * self.which + i] == 0 for i in (0, 1)])] = torch.inf
            part = distance.argmin(0)
        code = 2 * self.which + part
        sizes, sums = torch.bincount(code, minlength=2 * classes).to(A), class_sums(A, code, 2 * classes)
        group = torch.arange(classes).repeat_interleave(2)
        means = (self.S_z / self.n.clamp_min(1))[:, group] + sums / sizes.clamp_min(1)
        inputs = Deviations(deviations(A, code, sums), self.inputs.most)
        return replace(self, inputs=inputs, means=means, sizes=sizes, group=group)
