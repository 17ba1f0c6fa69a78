"""Messages as bytes: every value, dtype and layout comes back; anything else is refused."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.engine.blob import packed, unpacked
from fcl_bench.protocol.message import Message

FULL = torch.arange(6, dtype=torch.float64).reshape(2, 3)
TENSORS = {
    "rows": FULL,
    "columns": FULL.T.contiguous().T,
    "half": FULL.to(torch.bfloat16),
    "small": FULL.to(torch.float16),
    "whole": torch.tensor([[-3, 4]], dtype=torch.int8),
    "long": torch.tensor(2**62),
    "bytes": torch.arange(255, dtype=torch.uint8).reshape(1, 5, 51),
    "truth": torch.tensor([True, False]),
    "no rows": torch.zeros(0, 4, dtype=torch.float32),
    "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    "part": FULL[:, 1],
}


def message(**tensors: torch.Tensor) -> Message:
    return Message(tensors or TENSORS, "a stage", 7, cached=["long"], task=3, round=5)


def test_every_dtype_and_layout_comes_back():
    sent = message()
    came, beside = unpacked(packed(sent, client=4))
    assert beside == {"client": 4}
    assert list(came) == list(sent)
    for name, tensor in sent.items():
        assert came[name].dtype == tensor.dtype
        assert came[name].shape == tensor.shape
        bits = (part.contiguous().view(-1).view(torch.uint8) for part in (came[name], tensor))
        assert torch.equal(*bits)
    assert not came["columns"].is_contiguous()
    assert came["columns"].stride() == sent["columns"].stride()
    for name in ("stage", "samples", "task", "round", "cached", "nbytes"):
        assert getattr(came, name) == getattr(sent, name)


def test_what_came_can_be_changed_in_place():
    came, _ = unpacked(packed(message(rows=FULL)))
    came["rows"].add_(1)
    assert torch.equal(came["rows"], FULL + 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob: blob[:4],
        lambda blob: blob[:40],
        lambda blob: blob[:-1],
        lambda blob: blob + b"x",
        lambda blob: blob.replace(b'"float64"', b'"Tensor!"'),
        lambda blob: blob.replace(b'"float64"', b'"load   "'),
        lambda blob: blob.replace(b'"stage"', b'"stagE"'),
        lambda blob: blob.replace(b"[2, 3]", b"[2,-3]"),
        lambda blob: (2**62).to_bytes(8, "little") + blob[8:],
    ],
)
def test_anything_else_is_refused(damage):
    with pytest.raises(ValueError):
        unpacked(damage(packed(message(rows=FULL))))
