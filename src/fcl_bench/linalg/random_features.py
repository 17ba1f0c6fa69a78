"""Random features: one shared projection, drawn from a seed, and ReLU."""

from __future__ import annotations

import torch


class RandomFeatures:
    """H = ReLU(Z P) (FedRAN Eq. 6), P (d, M) with independent N(0, 1) entries; with M None the identity, H = Z.

    P is drawn in float64 on the CPU from the seed, so every client, device and `dtype` gets the same one.

    Args:
        seed: what the server sends instead of the matrix.
        inputs: d.
        outputs: M, or None.
        dtype, device: of P and of what `map` returns.
    """

    def __init__(self, seed: int, inputs: int, outputs: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self.outputs = inputs if outputs is None else outputs
        self.projection: torch.Tensor | None = None
        if outputs is not None:
            rng = torch.Generator().manual_seed(seed)
            drawn = torch.randn(inputs, outputs, generator=rng, dtype=torch.float64)
            self.projection = drawn.to(device, dtype)

    def map(self, z: torch.Tensor) -> torch.Tensor:
        """H (n, M) of features `z` (n, d)."""
        return z if self.projection is None else self.apply(z, self.projection)

    @staticmethod
    def apply(z: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
        """ReLU(Z P) for a projection that came whole instead of as a seed."""
        return (z @ projection).relu_()
