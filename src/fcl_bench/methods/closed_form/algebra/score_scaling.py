"""Factors that make every class's scores comparable in size, from the sums with which the classifier was solved."""

from __future__ import annotations

import torch


def score_scales(own: torch.Tensor) -> torch.Tensor:
    """(C,) the factor of each class's scores: 1 / sqrt(own_c), and 1 where own_c is not positive.

    Args:
        own: (C,) the sum of each class's scores over its own samples, B_c'w_c = n_c q_c.
    """
    positive = own > 0
    return torch.where(positive, torch.where(positive, own, torch.ones_like(own)).rsqrt(), torch.ones_like(own))


def unit_lengths(W: torch.Tensor) -> torch.Tensor:
    """(C,) the factor of each class's scores that gives its column of W (M, C) the length 1; 1 for a zero column."""
    length = W.norm(dim=0)
    return torch.where(length > 0, length, torch.ones_like(length)).reciprocal()
