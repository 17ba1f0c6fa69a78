"""Features so small, so large or so uneven that sums of squares say nothing of them are told."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from fcl_bench.backbones.extract import Features
from fcl_bench.errors import UserError
from fcl_bench.execution.inputs import require_range


def features(scale: float, rows: int = 200, **outlier: float) -> Features:
    rng = np.random.default_rng(0)
    train, test = (torch.from_numpy(rng.standard_normal((rows, 8)) * scale) for _ in range(2))
    for value in outlier.values():
        train[17, 3] = value
    return Features(train, test, 0.0, 0.0, False)


def told(made: Features, dtype: torch.dtype, wire: torch.dtype) -> str:
    try:
        require_range(made, dtype, wire)
    except UserError as error:
        return str(error)
    return ""


def test_a_site_without_samples_has_none_that_could_be_wrong():
    assert told(features(1, rows=0), torch.float64, torch.float32) == ""


@pytest.mark.parametrize(
    ("scale", "dtype", "wire", "says"),
    [
        (1, torch.float64, torch.float32, ""),
        (1e-10, torch.float64, torch.float32, ""),
        (1e-25, torch.float64, torch.float32, "underflow statistics in wire.dtype=float32"),
        (1e-25, torch.float64, torch.bfloat16, "underflow statistics in wire.dtype=bfloat16"),
        (1e-25, torch.float64, torch.float16, "underflow statistics in wire.dtype=float16"),
        (1e-25, torch.float64, torch.float64, ""),
        (1e-25, torch.float32, torch.float64, "underflow statistics in dtype=float32"),
        (1e-160, torch.float64, torch.float64, "underflow statistics in dtype=float64"),
        (1e-310, torch.float64, torch.float32, "underflow statistics in dtype=float64"),
        (0, torch.float64, torch.float32, "features are all zero"),
        (1e160, torch.float64, torch.float64, "overflow statistics in dtype=float64"),
        (1e20, torch.float32, torch.float32, "overflow statistics in dtype=float32"),
    ],
)
def test_the_range_of_each_type(scale, dtype, wire, says):
    assert says in told(features(scale), dtype, wire)
    assert bool(says) == bool(told(features(scale), dtype, wire))


@pytest.mark.parametrize("scale", [3e-16, 1e-15])
def test_the_limit_is_where_float32_loses_digits(scale):
    """Squares of what passes have all digits in float32, of what does not they lose some: the products show it."""
    made = features(scale)
    squares = made.train.abs().max() ** 2
    kept = float((squares.to(torch.float32).to(torch.float64) - squares).abs() / squares)
    assert kept < 2**-23
    assert told(made, torch.float64, torch.float32) == ""
    assert told(features(scale / 1e4), torch.float64, torch.float32) != ""


@pytest.mark.parametrize(
    ("size", "wire", "warned"),
    [
        (1e3, torch.float32, False),
        (1e6, torch.float32, True),
        (-1e6, torch.float32, True),
        (1e6, torch.float16, True),
        (1e6, torch.float64, False),
        (1e10, torch.float64, True),
    ],
)
def test_an_outlier_that_hides_all_others_is_named(size, wire, warned, caplog):
    with caplog.at_level(logging.WARNING, "fcl_bench"):
        assert told(features(1, outlier=size), torch.float64, wire) == ""
    assert ("training sample 17 has a feature of size" in caplog.text) == warned


def test_that_outlier_does_hide_them():
    """What is told is so: with the sample, float32 has nothing of what the other samples say."""
    plain, spoilt = features(1).train, features(1, outlier=1e6).train
    other = torch.cat([plain[:17], plain[18:]])
    row = spoilt[17].clone()
    row[:] = 1e6  # as random features spread it
    whole = (row.outer(row) + other.T @ other).to(torch.float32).to(torch.float64) - row.outer(row)
    exact = other.T @ other
    assert float((whole - exact).norm() / exact.norm()) > 0.5
