"""Features so large that sums of squares overflow, and features that are all zero, are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.backbones.extract import Features
from fcl_bench.errors import UserError
from fcl_bench.execution.inputs import require_range


def told(scale: float, dtype: torch.dtype, rows: int = 200) -> str:
    rng = np.random.default_rng(0)
    train, test = (torch.from_numpy(rng.standard_normal((rows, 8)) * scale) for _ in range(2))
    try:
        require_range(Features(train, test, 0.0, 0.0, False), dtype)
    except UserError as error:
        return str(error)
    return ""


def test_a_site_without_samples_has_none_that_could_be_wrong():
    assert told(1, torch.float64, rows=0) == ""


@pytest.mark.parametrize(
    ("scale", "dtype", "says"),
    [
        (1, torch.float64, ""),
        (1e-25, torch.float64, ""),
        (0, torch.float64, "features are all zero"),
        (1e160, torch.float64, "overflow statistics in dtype=float64"),
        (1e20, torch.float32, "overflow statistics in dtype=float32"),
    ],
)
def test_the_range_of_each_type(scale, dtype, says):
    assert says in told(scale, dtype)
    assert bool(says) == bool(told(scale, dtype))
