"""Layers whose weights their maker fills in."""

from __future__ import annotations

import warnings

import torch

from fcl_bench.randomness import seeded


def linear_to_fill(inputs: int, outputs: int) -> torch.nn.Linear:
    """A linear layer with any weights, on the CPU; no draw of theirs comes from everyone's generator."""
    # `skip_init` would draw nothing, and import half of torch's compiler for that, which takes a second.
    with warnings.catch_warnings(), seeded(0):
        # A task without a new class has a head without a row, which torch finds worth a warning.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return torch.nn.Linear(inputs, outputs)
