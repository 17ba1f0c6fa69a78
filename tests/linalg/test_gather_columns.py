"""Chosen columns of a convolution's unfolded inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fcl_bench.training.layer_inputs import gather_columns
from tests.linalg.subspace_cases import (
    array,
    seeds,
)
from tests.methods import fedprotip_oracle as oracle

CONVOLUTIONS = {
    "1x1": {"kernel_size": 1},
    "1x1 stride 2": {"kernel_size": 1, "stride": 2},
    "1x1 stride 3 padded": {"kernel_size": 1, "stride": 3, "padding": 1},
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3 valid": {"kernel_size": 3},
    "3x3 stride 2": {"kernel_size": 3, "stride": 2, "padding": 1},
    "3x3 stride 4 (gaps)": {"kernel_size": 3, "stride": 4},
    "3x3 dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "2x2 dilated stride 2": {"kernel_size": 2, "dilation": 3, "stride": 2},
    "7x7 stem": {"kernel_size": 7, "stride": 2, "padding": 3},
    "padding beyond the kernel": {"kernel_size": 2, "padding": 2},
    "rectangular": {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 1), "dilation": (1, 2)},
    "a row": {"kernel_size": (1, 5), "padding": (0, 2)},
}
IMAGES = [(7, 9), (8, 8), (9, 7)]


@pytest.mark.parametrize("size", IMAGES, ids=str)
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_every_patch_is_the_one_unfold_gives(options, size):
    layer = nn.Conv2d(3, 4, **options)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    columns = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    places = columns.shape[2]
    sample = torch.arange(2).repeat_interleave(places)
    place = torch.arange(places).repeat(2)
    gathered = gather_columns(x, layer, sample, place)
    assert gathered.dtype == x.dtype
    assert torch.equal(gathered, torch.cat([columns[0], columns[1]], dim=1))
    expected = [
        oracle.unfold(array(image), layer.kernel_size, layer.stride, layer.padding, layer.dilation) for image in x
    ]
    np.testing.assert_array_equal(array(gathered), np.concatenate(expected, axis=1))


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(3, 11), st.integers(3, 11)),
    st.tuples(st.integers(0, 20), seeds),
)
def test_drawn_patches_are_the_ones_unfold_gives(kernel, stride, padding, dilation, shape, drawn):
    m, seed = drawn
    spans = zip(shape[2:], kernel, padding, dilation, strict=True)
    assume(all(size + 2 * p > e * (k - 1) for size, k, p, e in spans))
    layer = nn.Conv2d(shape[1], 2, kernel, stride, padding, dilation, dtype=torch.float64)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=rng)
    columns = F.unfold(x, kernel, dilation, padding, stride)
    sample = torch.randint(shape[0], (m,), generator=rng)
    place = torch.randint(columns.shape[2], (m,), generator=rng)
    gathered = gather_columns(x, layer, sample, place)
    assert gathered.shape == (columns.shape[1], m)
    assert torch.equal(gathered, columns[sample, :, place].T)


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_the_weight_times_the_columns_is_the_layers_output(options):
    layer = nn.Conv2d(3, 4, **options, bias=False, dtype=torch.float64)
    x = torch.randn(3, 3, 8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    output = layer(x).detach().flatten(2)
    sample = torch.tensor([0, 2, 2, 1, 0, 2])
    place = torch.tensor([0, output.shape[2] - 1, 1, output.shape[2] // 2, 0, 0])
    columns = gather_columns(x, layer, sample, place)
    torch.testing.assert_close(layer.weight.detach().flatten(1) @ columns, output[sample, :, place].T)


def test_inputs_that_are_not_contiguous_give_the_same_patches():
    layer = nn.Conv2d(3, 4, 3, padding=1, stride=2)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    sample, place = torch.tensor([1, 0, 1]), torch.tensor([0, 15, 7])
    expected = gather_columns(x, layer, sample, place)
    assert torch.equal(gather_columns(x.to(memory_format=torch.channels_last), layer, sample, place), expected)
    assert torch.equal(gather_columns(x.transpose(2, 3).contiguous().transpose(2, 3), layer, sample, place), expected)
