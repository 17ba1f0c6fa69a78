"""Named tensors in one buffer against the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.linalg.tensors import Flat, add_weighted, pieces


@pytest.fixture
def tensors():
    """As of a network: a kernel with channels last, vectors, matrices of which two are views, and one without rows."""
    return {
        "kernel": torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "bias": torch.randn(4),
        "weight": torch.randn(5, 4),
        "turned": torch.randn(3, 6).T,
        "rows": torch.randn(6, 4)[::2],
        "number": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }


def test_copies_hold_the_same_numbers_side_by_side(tensors):
    flat = Flat.of(tensors)
    assert list(flat) == list(tensors)
    assert all(torch.equal(flat[name], value) for name, value in tensors.items())
    assert len(flat.buffer) == sum(value.numel() for value in tensors.values())
    assert flat["kernel"].is_contiguous(memory_format=torch.channels_last)
    # Every number of the buffer is one of a tensor, and of one only.
    flat.buffer.copy_(torch.arange(len(flat.buffer)))
    found = torch.cat([value.flatten() for value in flat.values()])
    assert found.sort().values.tolist() == list(range(len(flat.buffer)))
    assert not any(torch.equal(flat[name], tensors[name]) for name in ("kernel", "bias", "weight"))


def test_another_type_is_that_of_each_tensor(tensors):
    flat = Flat.of(tensors)
    double = flat.to(None, torch.float64)
    assert flat.to(torch.device("cpu"), torch.float32) is flat
    for name, value in tensors.items():
        assert torch.equal(double[name], value.double())
        assert double[name].stride() == flat[name].stride()


def test_a_sum_is_that_of_each_tensor_bit_for_bit(tensors):
    more = {name: value + torch.rand_like(value) for name, value in tensors.items()}
    total = add_weighted(add_weighted({}, Flat.of(tensors), 3.0), Flat.of(more), 0.7)
    assert isinstance(total, Flat)
    for name, value in tensors.items():
        expected = (value.double() * 3.0).add_(more[name].double(), alpha=0.7)
        assert torch.equal(total[name], expected)


def test_tensors_in_other_places_are_added_name_by_name(tensors):
    first = Flat.of(tensors)
    others = [
        tensors,
        Flat.of({name: tensors[name] for name in reversed(tensors)}),
        Flat.of({**tensors, "kernel": tensors["kernel"].contiguous()}),
    ]
    for other in others:
        total = add_weighted(add_weighted({}, first, 3.0), other, 0.7)
        for name, value in tensors.items():
            assert torch.equal(total[name], (value.double() * 3.0).add_(value.double(), alpha=0.7))


def test_what_holds_all_numbers(tensors):
    flat = Flat.of(tensors)
    assert [id(piece) for piece in pieces(flat)] == [id(flat.buffer)]
    assert [id(piece) for piece in pieces(tensors)] == [id(value) for value in tensors.values()]
    assert not len(Flat.of({}))
    assert Flat.of({}).buffer.numel() == 0


def test_several_types_are_refused():
    with pytest.raises(ValueError, match="several types"):
        Flat.of({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)})
