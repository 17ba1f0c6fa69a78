"""Messages: what they weigh, and what arrives."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.engine.codec import decoded, encoded
from fcl_bench.errors import UserError
from fcl_bench.protocol.context import WIRE_DTYPES, WireFormat, column_bytes, factor_bytes
from fcl_bench.protocol.fields import CLASSES, Uploads, counts, gram_matrix, orthonormal, real
from fcl_bench.protocol.message import Message

CPU = torch.device("cpu")
#: What tests declare of their fields.
DECLARED = Uploads(
    {
        "statistics": {
            "G": gram_matrix("M"),
            "B": real("M", "c", columns=CLASSES),
            "V": orthonormal("M", "r", unit=True),
            "sigma": real("r"),
            "counts": counts("c"),
        }
    }
)


def declared(message: Message, wire: WireFormat) -> Message:
    return encoded(message, wire, DECLARED)


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
    assert encoded(message(), WireFormat(dtype)).nbytes == expected


@pytest.mark.parametrize(("name", "error"), [("float64", 0), ("float32", 1e-7), ("float16", 1e-3), ("bfloat16", 8e-3)])
def test_what_arrives_is_what_was_sent_up_to_the_wire_precision(name, error):
    """Sums far beyond float16's range included: matrices travel with a scale per column."""
    sent = message()
    arrived = decoded(encoded(sent, WireFormat(WIRE_DTYPES[name])), torch.float64, CPU)
    assert set(arrived) == set(sent)
    for key, tensor in sent.items():
        assert arrived[key].dtype == tensor.dtype
        largest = tensor.abs().max(dim=0).values if tensor.ndim == 2 else tensor.abs().max()
        assert ((arrived[key] - tensor).abs() <= error * largest).all()


def test_a_name_may_end_in_scale():
    sent = Message({"adapter.scale": torch.ones(2, 2), "w": torch.ones(2)})
    for dtype in WIRE_DTYPES.values():
        assert set(decoded(encoded(sent, WireFormat(dtype)), torch.float64, CPU)) == {"adapter.scale", "w"}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_values_beyond_the_wires_range_are_told(name):
    sent = Message({"B": torch.full((3, 2), 1e39, dtype=torch.float64)})
    with pytest.raises(UserError, match=f"wire.dtype={name} can't hold the upload's B"):
        encoded(sent, WireFormat(WIRE_DTYPES[name]))
    with pytest.raises(FloatingPointError, match="B is not finite"):
        encoded(Message({"B": torch.full((3, 2), torch.nan)}), WireFormat(WIRE_DTYPES[name]))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_values_below_the_wires_range_arrive_as_zero(name):
    sent = Message({"B": torch.full((3, 2), 1e-50, dtype=torch.float64)})
    arrived = decoded(encoded(sent, WireFormat(WIRE_DTYPES[name])), torch.float64, CPU)
    assert torch.equal(arrived["B"], torch.zeros(3, 2, dtype=torch.float64))


def test_empty_and_zero_tensors_travel():
    sent = Message({"V": torch.zeros(4, 0, dtype=torch.float64), "B": torch.zeros(4, 2, dtype=torch.float64)})
    for dtype in WIRE_DTYPES.values():
        arrived = decoded(encoded(sent, WireFormat(dtype)), torch.float64, CPU)
        assert arrived["V"].shape == (4, 0)
        assert torch.equal(arrived["B"], sent["B"])


def gram(size: int = 40, rank: int = 12) -> torch.Tensor:
    X = torch.randn(rank, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    X[:, 3] = 0
    G = X.T @ X * 1e6
    return torch.triu(G) + torch.triu(G, 1).T


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_a_packed_gram_matrix_has_half_the_bytes_and_loses_nothing(name):
    sent = Message({"G": gram()})
    full, packed = (WireFormat(WIRE_DTYPES[name], gram=how) for how in ("full", "packed"))
    assert declared(sent, packed).nbytes == 40 * 41 // 2 * WIRE_DTYPES[name].itemsize
    assert declared(sent, full).nbytes == 40 * 40 * WIRE_DTYPES[name].itemsize
    arrived = [decoded(declared(sent, wire), torch.float64, CPU)["G"] for wire in (full, packed)]
    assert torch.equal(*arrived)


@pytest.mark.parametrize(("name", "error"), [("float16", 1e-3), ("bfloat16", 8e-3)])
def test_a_packed_gram_matrix_in_16_bit_travels_as_correlations(name, error):
    G = gram()
    sent = declared(Message({"G": G}), WireFormat(WIRE_DTYPES[name], gram="packed"))
    assert sent.nbytes == 40 * 41 // 2 * 2 + 40 * 4
    arrived = decoded(sent, torch.float64, CPU)["G"]
    scale = G.diagonal().sqrt()
    assert ((arrived - G).abs() <= error * scale * scale.unsqueeze(1)).all()
    assert torch.equal(arrived, arrived.T)


@pytest.mark.parametrize("name", list(WIRE_DTYPES))
def test_columns_of_classes_that_are_not_held_stay_at_home(name):
    B = message()["B"].repeat(1, 3)
    B[:, [0, 2, 3, 7]] = 0
    sent = Message({"B": B, "counts": torch.arange(9)})
    task, held = (WireFormat(WIRE_DTYPES[name], columns=how) for how in ("task", "held"))
    numbers = 4 * (1 + 5)
    assert declared(sent, held).nbytes == 5 * column_bytes(50, WIRE_DTYPES[name]) + numbers + 9 * 8
    arrived = [decoded(declared(sent, wire), torch.float64, CPU) for wire in (task, held)]
    assert torch.equal(arrived[0]["B"], arrived[1]["B"])
    assert set(arrived[1]) == {"B", "counts"}


def test_nothing_held_and_nothing_to_pack_travel_too():
    wire = WireFormat(torch.float16, gram="packed", columns="held")
    sent = Message(
        {"G": torch.zeros(3, 3, dtype=torch.float64), "B": torch.zeros(3, 4, dtype=torch.float64)},
    )
    arrived = decoded(declared(sent, wire), torch.float64, CPU)
    assert torch.equal(arrived["G"], sent["G"])
    assert torch.equal(arrived["B"], sent["B"])


def test_values_beyond_the_range_are_told_for_packed_and_held_tensors_too():
    wire = WireFormat(torch.float32, gram="packed", columns="held")
    for name in ("G", "B"):
        sent = Message({name: 1e39 * gram()})
        with pytest.raises(UserError, match=f"wire.dtype=float32 can't hold the upload's {name}"):
            declared(sent, wire)
    with pytest.raises(FloatingPointError, match="G is not finite"):
        declared(Message({"G": torch.full((2, 2), torch.nan)}), wire)


def unit_columns(rows: int, columns: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=rng))[0]


@pytest.mark.parametrize("name", list(WIRE_DTYPES))
def test_unit_columns_travel_in_eight_bits(name):
    """One byte per entry and no scale, whatever `wire.dtype` is; the rest of the message as ever."""
    V = unit_columns(200, 5)
    message = Message({"V": V, "sigma": torch.ones(5)})
    wire = WireFormat(WIRE_DTYPES[name], factors="int8")
    sent = declared(message, wire)
    assert sent.nbytes == 5 * (factor_bytes(200, wire) + column_bytes(None, wire.dtype))
    assert factor_bytes(200, wire) == 200
    arrived = decoded(sent, torch.float64, CPU)["V"]
    torch.testing.assert_close(torch.linalg.vector_norm(arrived, dim=0), torch.ones(5, dtype=torch.float64))
    # Half a step of the largest entry, and what the new length adds to that.
    assert ((arrived - V).abs() <= 0.6 / 127 * V.abs().amax(dim=0)).all()
    assert not torch.equal(arrived, V)
    torch.testing.assert_close(decoded(sent)["V"], arrived.float())


def test_factors_travel_like_everything_else_by_default():
    V = unit_columns(20, 3)
    for dtype in WIRE_DTYPES.values():
        wire = WireFormat(dtype)
        assert declared(Message({"V": V}), wire).nbytes == 3 * factor_bytes(20, wire)
        assert factor_bytes(20, wire) == column_bytes(20, dtype)


def test_columns_of_zeros_and_no_columns_arrive_as_they_are():
    wire = WireFormat(torch.float32, factors="int8")
    for V in (torch.zeros(4, 2), torch.zeros(4, 0), torch.zeros(0, 3)):
        assert torch.equal(decoded(declared(Message({"V": V}), wire), torch.float32)["V"], V)
    with pytest.raises(FloatingPointError, match="V is not finite"):
        declared(Message({"V": torch.full((3, 2), torch.nan)}), wire)
