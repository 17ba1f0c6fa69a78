"""Messages: what they weigh, and what arrives."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.federation.message import WIRE_DTYPES, Message, column_bytes

CPU = torch.device("cpu")


def message() -> Message:
    rng = torch.Generator().manual_seed(0)
    return Message(
        {
            "V": torch.randn(50, 7, dtype=torch.float64, generator=rng),
            "sigma": torch.rand(7, dtype=torch.float64, generator=rng),
            "B": 1e6 * torch.randn(50, 3, dtype=torch.float64, generator=rng),
            "counts": torch.arange(3),
        }
    )


@pytest.mark.parametrize("name", list(WIRE_DTYPES))
def test_the_size_is_the_payload(name):
    dtype = WIRE_DTYPES[name]
    expected = (7 + 3) * column_bytes(50, dtype) + 7 * column_bytes(None, dtype) + 3 * 8
    assert message().to_wire(dtype).nbytes == expected


@pytest.mark.parametrize(("name", "error"), [("float64", 0), ("float32", 1e-7), ("float16", 1e-3), ("bfloat16", 8e-3)])
def test_what_arrives_is_what_was_sent_up_to_the_wire_precision(name, error):
    """Sums far beyond float16's range included: matrices travel with a scale per column."""
    sent = message()
    arrived = sent.to_wire(WIRE_DTYPES[name]).from_wire(torch.float64, CPU)
    assert set(arrived) == set(sent)
    for key, tensor in sent.items():
        assert arrived[key].dtype == tensor.dtype
        largest = tensor.abs().max(dim=0).values if tensor.ndim == 2 else tensor.abs().max()
        assert ((arrived[key] - tensor).abs() <= error * largest).all()


def test_a_name_may_end_in_scale():
    sent = Message({"adapter.scale": torch.ones(2, 2), "w": torch.ones(2)})
    for dtype in WIRE_DTYPES.values():
        assert set(sent.to_wire(dtype).from_wire(torch.float64, CPU)) == {"adapter.scale", "w"}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_values_beyond_the_wires_range_are_told(name):
    sent = Message({"B": torch.full((3, 2), 1e39, dtype=torch.float64)})
    with pytest.raises(UserError, match=f"wire.dtype={name} can't hold the upload's B"):
        sent.to_wire(WIRE_DTYPES[name])
    with pytest.raises(FloatingPointError, match="B is not finite"):
        Message({"B": torch.full((3, 2), torch.nan)}).to_wire(WIRE_DTYPES[name])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_values_below_the_wires_range_arrive_as_zero(name):
    sent = Message({"B": torch.full((3, 2), 1e-50, dtype=torch.float64)})
    arrived = sent.to_wire(WIRE_DTYPES[name]).from_wire(torch.float64, CPU)
    assert torch.equal(arrived["B"], torch.zeros(3, 2, dtype=torch.float64))


def test_empty_and_zero_tensors_travel():
    sent = Message({"V": torch.zeros(4, 0, dtype=torch.float64), "B": torch.zeros(4, 2, dtype=torch.float64)})
    for dtype in WIRE_DTYPES.values():
        arrived = sent.to_wire(dtype).from_wire(torch.float64, CPU)
        assert arrived["V"].shape == (4, 0)
        assert torch.equal(arrived["B"], sent["B"])
