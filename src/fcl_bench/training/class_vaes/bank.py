"""Autoencoders by the columns of their classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bank:
    """Weights of the classes that there are any of.

    Attributes:
        columns: (k,) int64 of the classes, ascending.
        weights: (k, P) float32.
    """

    columns: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def empty(cls, numbers: int, device: torch.device) -> Bank:
        """Without a class; `numbers` is P."""
        return cls(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, numbers, device=device))

    def has(self, columns: torch.Tensor) -> torch.Tensor:
        """(c,) which of these there are."""
        return torch.isin(columns, self.columns)

    def at(self, columns: torch.Tensor) -> torch.Tensor:
        """The weights (c, P) of these classes, which are all there."""
        return self.weights[torch.searchsorted(self.columns, columns)]

    def updated(self, columns: torch.Tensor, weights: torch.Tensor) -> Bank:
        """With other weights (c, P) of these classes (c,), new ones among them."""
        stay = ~torch.isin(self.columns, columns)
        found = torch.cat([self.columns[stay], columns])
        order = found.argsort()
        return Bank(found[order], torch.cat([self.weights[stay], weights])[order])
