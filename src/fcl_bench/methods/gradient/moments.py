"""First and second moments of samples, as sums that add up over any partition, and the Gaussian that has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Moments:
    """The moments of one class.

    Attributes:
        count: n.
        total: (d,) the sum of its samples.
        second: (d, d) the sum of z z', or (d,) of z * z, which makes the covariance diagonal.
    """

    count: int
    total: torch.Tensor
    second: torch.Tensor

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of samples together."""
        return Moments(self.count + other.count, self.total + other.total, self.second + other.second)

    @property
    def mean(self) -> torch.Tensor:
        """(d,)."""
        return self.total / self.count

    @property
    def covariance(self) -> torch.Tensor:
        """(d, d), or its diagonal (d,): (S - n m m') / (n - 1); 0 for a single sample."""
        if self.count < 2:
            return torch.zeros_like(self.second)
        mean = self.mean
        square = torch.outer(mean, mean) if self.second.ndim == 2 else mean.square()
        return (self.second - self.count * square) / (self.count - 1)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """(count, d) samples of the Gaussian with this mean and covariance; `generator` is on the CPU.

        Rounding may make the covariance indefinite, and fewer samples than features make it singular: variances that
        are not positive count as 0.
        """
        drawn = torch.randn((count, len(self.total)), generator=generator, dtype=torch.float64).to(self.total)
        covariance = self.covariance
        if covariance.ndim == 1:
            return self.mean + drawn * covariance.clamp(min=0).sqrt()
        variances, directions = torch.linalg.eigh(covariance)
        return self.mean + (drawn * variances.clamp(min=0).sqrt()) @ directions.T
