"""Random features: one shared projection, drawn from a seed, and ReLU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fcl_bench.linalg.product import product

#: Most bytes of H that are made at a time, and fewest rows, where H is not needed whole.
_BLOCK_BYTES, _BLOCK_ROWS = 2**26, 256


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

    @classmethod
    def given(cls, projection: torch.Tensor) -> RandomFeatures:
        """Those of a projection (d, M) that came whole instead of as a seed."""
        features = cls.__new__(cls)
        features.outputs, features.projection = projection.shape[1], projection
        return features

    def map(self, z: torch.Tensor) -> torch.Tensor:
        """H (n, M) of features `z` (n, d)."""
        return z if self.projection is None else self.linear(z).relu_()

    def linear(self, z: torch.Tensor) -> torch.Tensor:
        """Z P (n, M), before ReLU; with M None Z."""
        return z if self.projection is None else product(self.projection.T, z.T).T

    def blocks(self, z: torch.Tensor) -> Iterator[torch.Tensor]:
        """H by blocks of `rows` rows, so that it is never whole in memory."""
        return map(self.map, z.split(self.rows))

    @property
    def rows(self) -> int:
        """Samples in a block."""
        return max(_BLOCK_ROWS, _BLOCK_BYTES // (8 * self.outputs))
