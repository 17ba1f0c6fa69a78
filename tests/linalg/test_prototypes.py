"""Pseudo-labels against the oracle, and what is never accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.methods.closed_form.fedran import pseudo_labels
from tests.methods import ssl_oracle


def given_labels(Z, y, U, tau):
    return pseudo_labels(*(torch.from_numpy(np.asarray(a)) for a in (Z, y, U)), tau).tolist()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    labelled=st.integers(0, 12),
    unlabelled=st.integers(0, 12),
    tau=st.sampled_from([-1.0, 0.0, 0.5, 0.9]),
)
def test_agrees_with_the_oracle(seed, labelled, unlabelled, tau):
    rng = np.random.default_rng(seed)
    Z, U = rng.standard_normal((labelled, 3)), rng.standard_normal((unlabelled, 3))
    y = rng.choice([2, 5, 7], labelled)
    U[rng.random(unlabelled) < 0.2] = 0
    assert given_labels(Z, y, U, tau) == ssl_oracle.pseudo_labels(Z, y, U, tau).tolist()


@pytest.mark.parametrize("tau", [-1.0, 0.5])
def test_features_without_a_direction_are_never_accepted_nor_chosen(tau):
    Z = np.array([[1.0, 0], [-1, 0], [0, 2]])
    U = np.array([[0.0, 0], [1, 1], [0, 3]])
    # Class 4's prototype cancels to zero.
    assert given_labels(Z, [4, 4, 9], U, tau) == [-1, 9, 9]
    assert given_labels(Z[:2], [4, 4], U, tau) == [-1, -1, -1]


def test_scale_does_not_matter_and_the_threshold_is_inclusive():
    Z, U = np.array([[1.0, 0], [0, 1]]), np.array([[3.0, 4]])
    assert given_labels(Z, [0, 1], U, 0.8) == given_labels(1e-150 * Z, [0, 1], 1e-150 * U, 0.79) == [1]
    assert given_labels(Z, [0, 1], U, 0.8 + 1e-9) == [-1]
