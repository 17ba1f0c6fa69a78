"""Autoencoders by the columns of their classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bank:
    """The weights of the classes that have an autoencoder.

    Attributes:
        columns: (k,) int64 of the classes, ascending.
        weights: (k, P) float32.
    """

    columns: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def empty(cls, numbers: int, device: torch.device) -> Bank:
        """A bank without a class; `numbers` is P."""
        return cls(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, numbers, device=device))

    def has(self, columns: torch.Tensor) -> torch.Tensor:
        """(c,) which of these classes have an autoencoder."""
        return torch.isin(columns, self.columns)

    def at(self, columns: torch.Tensor) -> torch.Tensor:
        """The weights (c, P) of these classes, all of which have an autoencoder."""
        return self.weights[torch.searchsorted(self.columns, columns)]

    def updated(self, columns: torch.Tensor, weights: torch.Tensor) -> Bank:
        """A bank with these weights (c, P) for these classes (c,), some of which may be new."""
        stay = ~torch.isin(self.columns, columns)
        found = torch.cat([self.columns[stay], columns])
        order = found.argsort()
        return Bank(found[order], torch.cat([self.weights[stay], weights])[order])
