"""The check that all values are finite."""

from __future__ import annotations

import torch

from fcl_bench.linalg.finite import all_finite


def test_values_are_finite_together_or_not():
    huge = torch.full((3,), 3e38)
    assert all_finite(huge, huge)
    assert all_finite(torch.zeros(0), torch.tensor(1.0))
    assert not all_finite(huge, torch.tensor([0.0, torch.nan]))
    assert not all_finite(torch.tensor([torch.inf]), torch.tensor([-torch.inf]))


def test_every_place_of_small_and_large_tensors_is_looked_at():
    sizes = (1, 4096, 4097, 9000)
    assert all_finite(*map(torch.ones, sizes), torch.arange(5), torch.ones(2, 3, dtype=torch.float64))
    for size in sizes:
        for bad in (torch.inf, -torch.inf, torch.nan):
            tensors = [torch.ones(n) for n in sizes]
            tensors[sizes.index(size)][-1] = bad
            assert not all_finite(*tensors), (size, bad)
