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
