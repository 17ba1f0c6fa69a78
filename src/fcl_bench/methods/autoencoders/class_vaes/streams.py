"""Random numbers by key and place: a class's numbers do not depend on the classes that are drawn beside it.

A number is a hash of its key and its place (SplitMix64's; Steele, Lea and Flood, OOPSLA 2014), so that the streams of
any number of classes are drawn in one operation, in any order, and again whenever they are needed.
"""

from __future__ import annotations

import math

import torch

#: The golden ratio's odd multiplier, and SplitMix64's two, as signed 64-bit numbers.
_GOLDEN, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: Bits of a uniform number: as many as float32 holds.
_BITS = 24


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def keys(seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """A key (int64) for each of `numbers`, columns of classes for instance, under a 63-bit seed."""
    return _mixed(_mixed(torch.as_tensor(seed, device=numbers.device)) + numbers.long() * _GOLDEN)


def further(keys: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
    """Keys derived from these for a purpose, a step or the like."""
    # A tensor, since its products wrap around.
    return _mixed(keys + (torch.as_tensor(number, device=keys.device) + 1) * _GOLDEN)


def keys_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """A key (n,) for each of the rows (n, d) of floating-point numbers, by their bits alone."""
    bits = rows.double().view(torch.int64)
    places = keys(0, torch.arange(bits.shape[1], device=bits.device))
    return _mixed((_mixed(bits ^ places)).sum(dim=1))


def _hashes(keys: torch.Tensor, count: int) -> torch.Tensor:
    """(k, count) int64 for keys (k,). A larger count begins with the same numbers."""
    places = torch.arange(1, count + 1, device=keys.device) * _GOLDEN
    return _mixed(keys.unsqueeze(1) + places)


def _uniform(bits: torch.Tensor, high: bool) -> torch.Tensor:
    """Numbers above 0 and at most 1, in float32, from the upper or the lower half of the bits."""
    chosen = _shifted(bits, 64 - _BITS) if high else bits & ((1 << _BITS) - 1)
    return (chosen.float() + 0.5) / 2**_BITS


def uniforms(keys: torch.Tensor, count: int) -> torch.Tensor:
    """(k, count) float32 between 0 and 1 for keys (k,)."""
    return _uniform(_hashes(keys, count), high=True)


def normals(keys: torch.Tensor, count: int) -> torch.Tensor:
    """(k, count) float32 standard normal for keys (k,), by Box and Muller's pairs."""
    bits = _hashes(keys, (count + 1) // 2)
    length = (-2 * _uniform(bits, high=True).log()).sqrt()
    angle = 2 * math.pi * _uniform(bits, high=False)
    return torch.stack([length * angle.cos(), length * angle.sin()], dim=2).flatten(1)[:, :count]


def orders(keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Random orders of 0 to counts - 1 for each key, followed by the rest of 0 to max(counts) - 1.

    Args:
        keys: (k,).
        counts: (k,).

    Returns:
        (k, max(counts)) int64.
    """
    width = int(counts.max())
    outside = torch.arange(width, device=keys.device) >= counts.unsqueeze(1)
    return _hashes(keys, width).masked_fill(outside, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
