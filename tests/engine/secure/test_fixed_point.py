"""Fixed-point numbers and their sums, against Python's fractions and whole numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.errors import UserError
from fcl_bench.options.secure.party import FIXED, SAMPLES, WHOLE, FixedPoint, flat
from fcl_bench.protocol.message import Message

FORMS = [FixedPoint(64, 24), FixedPoint(64, 0), FixedPoint(32, 8), FixedPoint(64, 62)]


def total(fixed: FixedPoint, uploads: list[Message]) -> Message:
    """The sum as the server gets it, without masks."""
    parts = [fixed.encoded(upload, len(uploads), k) for k, upload in enumerate(uploads)]
    sums = {name: tensor.clone() for name, tensor in parts[0].items()}
    for part in parts[1:]:
        for name, tensor in part.items():
            flat(sums[name])[:] += flat(tensor)
    return fixed.decoded(sums, uploads[0], len(uploads))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from(FORMS))
def test_a_sum_is_off_by_half_a_step_of_each(clients, seed, fixed):
    rng = np.random.default_rng(seed)
    step = 2.0**-fixed.fraction_bits
    largest = fixed.most(clients) * step
    values = rng.uniform(-1, 1, (clients, 7)) * min(largest, 1e6) * 0.999
    found = total(fixed, [Message({"x": torch.from_numpy(row)}) for row in values])["x"]
    for place in range(7):
        exact = sum((Fraction(float(value)) for value in values[:, place]), Fraction(0))
        rounding = Fraction(step) * clients / 2 + abs(exact) * Fraction(2) ** -52
        assert abs(Fraction(float(found[place])) - exact) <= rounding


def test_the_multiples_are_those_of_python():
    values = [0.0, 0.5, -0.5, 1.25, -3.7, 1e9 + 1 / 3, -1e-9]
    encoded = FixedPoint(64, 24).encoded(Message({"x": torch.tensor(values, dtype=torch.float64)}), 3, 0)
    assert encoded["x" + FIXED].tolist() == [round(Fraction(value) * 2**24) for value in values]


def test_counts_and_samples_have_no_step():
    uploads = [Message({"n": torch.tensor([k, 5], dtype=torch.int32)}, samples=k + 1) for k in range(4)]
    encoded = FixedPoint(32, 20).encoded(uploads[2], 4, 0)
    assert {name: value.tolist() for name, value in encoded.items()} == {"n" + WHOLE: [2, 5], SAMPLES + WHOLE: [3]}
    found = total(FixedPoint(32, 20), uploads)
    assert (found["n"].tolist(), found.samples, found.clients) == ([6, 20], 10, 4)


@pytest.mark.parametrize("fixed", FORMS)
@pytest.mark.parametrize("clients", [1, 3, 7])
def test_the_largest_numbers_do_not_wrap_around_and_larger_ones_are_refused(fixed, clients):
    most = fixed.most(clients)
    assert most * clients < 2 ** (fixed.bits - 1) <= (most + 1) * clients
    for sign in (1, -1):
        upload = Message({"n": torch.tensor([sign * most])})
        assert int(total(fixed, [upload] * clients)["n"]) == sign * most * clients
        if most + 1 < 2**63:
            with pytest.raises(UserError, match=r"client 2's n in task 0, round 0 .* of each of"):
                fixed.encoded(Message({"n": torch.tensor([sign * (most + 1)])}), clients, 2)
    if fixed.bits - fixed.fraction_bits < 40:
        with pytest.raises(UserError, match="a smaller secure.fraction_bits"):
            fixed.encoded(Message({"x": torch.tensor([2.0 ** (fixed.bits - fixed.fraction_bits)])}), clients, 0)


def test_what_is_not_finite_is_never_sent():
    with pytest.raises(FloatingPointError, match="upload's x"):
        FixedPoint(64, 24).encoded(Message({"x": torch.tensor([torch.nan])}), 2, 0)


def test_of_a_symmetric_matrix_the_triangle_may_travel():
    G = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    encoded = FixedPoint(64, 1).encoded(Message({"G": G}), 2, 0, ["G"])
    assert {name: value.tolist() for name, value in encoded.items()} == {"G::packed" + FIXED: [4, 2, 6]}
