"""The check that all values are finite."""

from __future__ import annotations

import torch

from fcl_bench.linalg.tensors import all_finite


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


class Elsewhere(torch.Tensor):
    """On another device, as far as it says; torch joins no tensors of two devices."""

    device = torch.device("meta")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function is not torch.cat or all(isinstance(tensor, cls) for tensor in args[0])
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensors_of_two_devices_are_looked_at():
    here, there = torch.ones(3), torch.ones(3).as_subclass(Elsewhere)
    assert all_finite(here, there, here)
    assert all_finite(there, here, there)
    assert not all_finite(here, torch.tensor([torch.nan]).as_subclass(Elsewhere))
