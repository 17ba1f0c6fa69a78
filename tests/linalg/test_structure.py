"""What Gram matrices, bases and spectra are to rounding: honest ones pass in every type, and faults are found."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.linalg import structure
from fcl_bench.linalg.structure import (
    EXACT,
    descending_trouble,
    gram_trouble,
    orthonormal_trouble,
    packed,
    packed_grams_trouble,
    sums_trouble,
    symmetric,
)

LARGE = EXACT + 60


def features(seed: int, n: int, M: int, relu: bool = True) -> torch.Tensor:
    H = np.random.default_rng(seed).standard_normal((n, M))
    return torch.from_numpy(np.maximum(H, 0) if relu else H)


def gram_of(seed: int, n: int, M: int, relu: bool = True) -> torch.Tensor:
    H = features(seed, n, M, relu)
    return H.T @ H


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3, 40, 400]),
    st.sampled_from([1, 2, 17, LARGE]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.floats(-4, 4),
)
def test_honest_gram_matrices_pass_after_any_rounding(seed, n, M, dtype, relu, decades):
    """Of few samples and many, features of any scale beside each other, rounded entry by entry, and packed."""
    H = features(seed, n, M, relu) * torch.logspace(0, decades, M, dtype=torch.float64)
    H[:, M // 2] = 0  # a feature that is always 0
    G = H.T @ H
    scale = G.abs().amax(dim=0, keepdim=True).clamp_min(1e-300)
    rounded = (G / scale).to(dtype).double() * scale
    eps = torch.finfo(dtype).eps + 256 * 2**-52
    for proven in (False, True):
        assert gram_trouble(rounded, eps, proven) == ""
        assert packed_grams_trouble(packed((rounded + rounded.T) / 2).unsqueeze(1), eps, proven) == ""
        assert gram_trouble(G + torch.eye(M), eps, proven) == ""


def plus(G: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    changed = G.clone()
    changed[row, column] += value
    return changed


def direction(M: int) -> torch.Tensor:
    v = torch.randn(M, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return v / torch.linalg.vector_norm(v)


@pytest.mark.parametrize("M", [12, LARGE])
@pytest.mark.parametrize("n", [5, 600])
def test_faults_are_found(M, n):
    G, eps = gram_of(0, n, M), 2**-23
    mean, v = float(G.trace()) / M, direction(M)
    assert "diagonal" in gram_trouble(-G, eps)
    assert "diagonal" in gram_trouble(plus(G, 3, 3, -float(G[3, 3]) - 1), eps)
    row, column = divmod(int((torch.outer(G.diagonal(), G.diagonal()).sqrt() - G.abs()).argmax()), M)
    assert gram_trouble(plus(G, row, column, 0.01 * float(G[row, row] * G[column, column]) ** 0.5), eps) != ""
    # Half of what should be there, in one triangle, is within every bound on entries.
    assert gram_trouble(G.triu() + 0.5 * G.tril(-1), eps) == "is not symmetric"
    turned = G + 0.01 * (G.triu(1) - G.tril(-1)) / 2
    assert gram_trouble(turned, eps) != ""
    both = plus(plus(G, 0, 2, 1.5 * float(G.diagonal().max())), 2, 0, 1.5 * float(G.diagonal().max()))
    assert "larger than" in gram_trouble(both, eps)
    assert gram_trouble(G - (float(v.T @ G @ v) + mean) * (v @ v.T), eps) != ""
    assert gram_trouble(torch.zeros(M, M), eps) == ""
    assert gram_trouble(plus(torch.zeros(M, M), 0, 1, 1.0), eps) == "is not zero, and its diagonal is"


def without_numbers(told: str) -> str:
    return re.sub(r"[-\d.][-+\de.]*", "#", told)


@pytest.mark.parametrize("M", [12, LARGE])
@pytest.mark.parametrize("size", [1e-30, 1e-19, 1.0, 1e19, 1e30])
def test_the_size_of_a_matrix_and_its_type_do_not_matter(M, size):
    """What is said of a matrix is said of its multiples, as they came in float32 or converted to float64."""
    G, eps, v = gram_of(0, 600, M), 2**-23, direction(M)
    G = G / float(G.diagonal().max())
    mean = float(G.trace()) / M
    negative = G - (float(v.T @ G @ v) + mean) * (v @ v.T)
    for matrix in (G, G.triu() + 0.5 * G.tril(-1), plus(plus(G, 0, 2, 1.5), 2, 0, 1.5), negative):
        expected = without_numbers(gram_trouble(matrix, eps))
        assert bool(expected) == (matrix is not G)
        sent = (size * matrix).float()
        before = sent.clone()
        for told in (gram_trouble(sent, eps), gram_trouble(sent.double(), eps)):
            assert without_numbers(told) == expected
        assert torch.equal(sent, before)


def test_of_a_small_matrix_every_negative_eigenvalue_is_found_and_of_a_large_one_those_that_matter():
    """What the page on hostile uploads says of it, in units of the mean eigenvalue."""
    G = gram_of(1, 1000, LARGE)
    mean, (lengths, directions) = float(G.trace()) / LARGE, torch.linalg.eigh(G)
    u = directions[:, LARGE // 2 : LARGE // 2 + 1]

    def told(share: float) -> str:
        return gram_trouble(G - (float(lengths[LARGE // 2]) + share * mean) * (u @ u.T), 2**-52)

    assert "has an eigenvalue of -" in told(1)
    assert told(1e-4) == ""
    small = gram_of(1, 1000, EXACT)
    values, vectors = torch.linalg.eigh(small)
    own = vectors[:, :1] @ vectors[:, :1].T
    assert gram_trouble(small - 0.999 * float(values[0]) * own, 2**-40) == ""
    assert "eigenvalue" in gram_trouble(small - (float(values[0]) + 1e-6 * float(small.trace())) * own, 2**-40)


@pytest.mark.parametrize("n", [30, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_matrix_passes_the_proof_with_an_eigenvalue_below_the_bound(n, dtype):
    """One negative eigenvalue of a large matrix, in a direction that Lanczos' first vector does not have."""
    G, rounding = gram_of(2, n, LARGE), torch.finfo(dtype).eps + 256 * 2**-52
    start = structure._direction(LARGE)
    vectors = torch.linalg.eigh(G)[1]
    v = vectors[:, LARGE // 2] - (start @ vectors[:, LARGE // 2]) * start
    v = (v / torch.linalg.vector_norm(v))[:, None]
    # The least multiple of vv' that leaves no negative eigenvalue, but for what is taken off beyond it.
    off = float(v.T @ G @ v) if n < LARGE else 1 / float(v.T @ torch.linalg.solve(G, v))
    trace = float(G.trace())
    for share, refused in ((0.0, False), (1.0, False), (20.0, True), (1e4, True), (1e-3 / rounding, True)):
        matrix = G - (max(off, 0.0) * (n >= LARGE) + share * rounding * trace) * (v @ v.T)
        matrix = ((matrix + matrix.T) / 2).to(dtype)
        told = gram_trouble(matrix, rounding, proven=True)
        assert told.startswith("has an eigenvalue of -") == refused, (share, told)
        least = float(torch.linalg.eigvalsh(matrix.double())[0])
        bound = 4 * rounding * trace + 3 * LARGE * 2**-52 * trace
        assert refused or least >= -bound
        if share in (20.0, 1e4):
            assert least < -bound
            assert gram_trouble(matrix, rounding) == "", "what six steps find is not all that there is"


def test_the_proof_finds_what_the_cheap_checks_find():
    G, eps = gram_of(0, 600, LARGE), 2**-23
    assert gram_trouble(G.triu() + 0.5 * G.tril(-1), eps, proven=True) == "is not symmetric"
    apart = plus(G, LARGE - 1, 0, 1e-3 * float(G[0, 0]))
    assert gram_trouble(apart, eps, proven=True) == "is not symmetric"
    both = plus(plus(G, 0, 2, 1.5 * float(G.diagonal().max())), 2, 0, 1.5 * float(G.diagonal().max()))
    assert "eigenvalue" in gram_trouble(both, eps, proven=True)
    assert "diagonal" in gram_trouble(-G, eps, proven=True)
    assert gram_trouble(torch.zeros(LARGE, LARGE), eps, proven=True) == ""


def test_a_column_of_packed_grams_is_named():
    good = packed(gram_of(2, 9, 5))
    bad = packed(symmetric(good) - 3 * torch.eye(5) * float(good.max()))
    assert packed_grams_trouble(torch.stack([good, good], dim=1), 2**-40) == ""
    assert packed_grams_trouble(torch.stack([good, bad], dim=1), 2**-40).endswith("on its diagonal in column 1")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_orthonormal_columns_pass_rounded_and_others_do_not(dtype):
    V = torch.linalg.qr(features(3, 50, 7, relu=False))[0]
    eps = torch.finfo(dtype).eps + 1e-12
    assert orthonormal_trouble(V.to(dtype).double(), eps) == ""
    assert orthonormal_trouble(V[:, :0], eps) == ""
    for bad in (1.1 * V, V[:, [0, 0]], torch.ones_like(V), V + 0.1, torch.zeros_like(V), V * 0.9):
        assert "off by" in orthonormal_trouble(bad, eps)
    assert orthonormal_trouble(torch.eye(3)[:2], eps) == "has 3 columns of 2 numbers"


def test_singular_values_descend():
    assert descending_trouble(torch.tensor([3.0, 3.0, 1.0, 0.0]), 1e-7) == ""
    assert descending_trouble(torch.tensor([3.0, 1.0, 1.0 + 1e-8]), 1e-7) == ""
    assert descending_trouble(torch.zeros(0), 1e-7) == ""
    assert descending_trouble(torch.tensor([3.0, 1.0, 2.0]), 1e-7) == "rises at 2"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 5))
def test_sums_are_no_larger_than_the_trace_allows(seed, n, classes):
    rng = np.random.default_rng(seed)
    H, labels = torch.from_numpy(rng.standard_normal((n, 6)) + 2), rng.integers(0, classes, n)
    sizes = torch.from_numpy(np.bincount(labels, minlength=classes))
    sums = torch.stack([H[torch.from_numpy(labels == c)].sum(dim=0) for c in range(classes)], dim=1)
    trace = float(H.square().sum())
    assert sums_trouble(sums, trace, sizes, 2**-40) == ""
    assert sums_trouble(sums, trace, float(n), 2**-40) == ""
    assert "allows" in sums_trouble(sums * (n + 1), trace, sizes, 2**-40, "G")


def test_equal_samples_are_the_edge():
    h = torch.tensor([[1.0, 2.0]], dtype=torch.float64).repeat(4, 1)
    sums, trace = h.sum(dim=0, keepdim=True).T, float(h.square().sum())
    assert sums_trouble(sums, trace, torch.tensor([4]), 2**-52) == ""
    assert sums_trouble(sums, 0.99 * trace, torch.tensor([4]), 2**-52) != ""
    assert sums_trouble(sums, trace, torch.tensor([3]), 2**-52) != ""
