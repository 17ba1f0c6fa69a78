"""Malformed bytes into every decoder between processes: one line each, and memory in proportion to what came."""

from __future__ import annotations

import contextlib
import json
import socket
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fcl_bench.engine.blob import LONGEST_HEADER, packed, unpacked
from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.remote.replies import (
    Received,
    RemoteError,
    deserialise,
    deserialise_reply,
    serialise,
    serialise_reply,
)
from fcl_bench.engine.single_sample_leakage import Leakage
from fcl_bench.errors import UserError
from fcl_bench.flower import frames
from fcl_bench.flower.node_registry import NodeInfo, NodeRegistry
from fcl_bench.protocol.message import Message

MESSAGE = Message({"G": torch.eye(3).double(), "n": torch.tensor([1, 2])}, "statistics", 3, task=1, round=2)
REPLY = serialise_reply(Reply(1, MESSAGE, 0.5, None, {"model": 8}, 0, Leakage(1, 0, np.array([4]))))
INFO = NodeInfo("a", "run", "1", "2", 1, None, "cpu", [0, 2], [[1, 2], [3, 4]], [[1, 2], [0, 4]], {}, "data", "x", {})
INFO = asdict(INFO) | {"raw": asdict(RawSamples("features", 8)), "package": __import__("fcl_bench").__version__}

texts = st.text("aG.$\n\x1b\u202e\ud800", max_size=8)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from(
        [2**31, 2**40, 2**62, 2**63, -1, 1e308, float("nan"), float("inf"), "G", "float64", "load", "bool"]
    )
    | st.floats()
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


def one_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 2500


def header_of(blob: bytes) -> dict:
    return json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])


def with_header(blob: bytes, header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + blob[8 + int.from_bytes(blob[:8], "little") :]


def paths_of(node: object, path: tuple = ()) -> list[tuple]:
    """Every place in nested lists and mappings."""
    parts = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else []
    return [path, *(found for key, part in parts for found in paths_of(part, (*path, key)))]


def changed(node: object, path: tuple, value: object) -> object:
    """A copy with another value at a place; `...` leaves the place out."""
    if not path:
        return {} if value is ... else value
    copy = dict(node) if isinstance(node, dict) else list(node)  # type: ignore[call-overload]
    if value is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


@st.composite
def mutated(draw: st.DrawFn, blob: bytes) -> bytes:
    """A blob whose header has another value somewhere, or some of whose bytes are others."""
    if draw(st.booleans()):
        header = header_of(blob)
        for _ in range(draw(st.integers(1, 2))):
            places = paths_of(header)
            header = changed(header, draw(st.sampled_from(places)), draw(json_values | st.just(...)))
        return with_header(blob, header)
    copy = bytearray(blob)
    for _ in range(draw(st.integers(1, 4))):
        copy[draw(st.integers(0, min(len(copy), 400) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(copy)))
    return bytes(copy[:cut] if draw(st.booleans()) else copy + draw(st.binary(max_size=9)))


def reads(blob: bytes) -> None:
    """A reply is read as the server's process does, and whatever is accepted can be computed with and sent on."""
    try:
        reply = deserialise_reply(deserialise(blob))
    except (UserError, RemoteError) as error:
        one_line(error)
        return
    for tensor in reply.upload.values():
        assert tensor.numel() * tensor.itemsize <= len(blob)
        tensor.clone()
    deserialise_reply(deserialise(serialise_reply(reply)))


def reads_info(state: object) -> None:
    registry = NodeRegistry(3, 2, lambda info: None)
    try:
        info = NodeInfo.read(state if isinstance(state, dict) else {})
        registry.register("1", info)
    except UserError as error:
        one_line(error)
        return
    json.dumps(info.record_entry())
    assert 0 <= registry.labelled.min() <= registry.samples.max() < 2**31


def reads_frame(content: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            here.sendall(content)
        here.shutdown(socket.SHUT_WR)
        try:
            frame = frames.receive(there, most=2**16)
        except ConnectionError as error:
            one_line(error)
            return
        assert frame is None or sum(map(len, frame.blobs)) <= 2**16


def frame_of(header: object, lengths: object, body: bytes = b"abc") -> bytes:
    text = json.dumps({"header": header, "lengths": lengths}).encode()
    return len(text).to_bytes(8, "little") + text + body


frame_bytes = st.one_of(
    st.binary(max_size=60),
    st.builds(frame_of, json_values, json_values),
    st.builds(frame_of, st.just({"do": "push"}), st.lists(st.integers(-5, 2**66) | json_values, max_size=4)),
    mutated(frame_of({"do": "push", "node": "7"}, [3])),
)
CASES: dict[str, tuple[st.SearchStrategy, Callable[..., None]]] = {
    "replies": (mutated(REPLY), reads),
    "any bytes": (st.binary(max_size=200), reads),
    "any header": (st.builds(with_header, st.just(REPLY), json_values), reads),
    "user errors": (mutated(serialise("user error", what="it", remedy="that")), reads),
    "nodes": (
        st.builds(lambda place, value: changed(INFO, place, value), st.sampled_from(paths_of(INFO)), json_values),
        reads_info,
    ),
    "frames": (frame_bytes, reads_frame),
}


def pushed(case: str, inputs: int) -> int:
    """Push so many inputs into a case's decoder; returns the most bytes that one took in Python."""
    strategy, decode = CASES[case]
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

    @settings(max_examples=inputs, database=None, deadline=None, derandomize=True, suppress_health_check=checks)
    @given(strategy)
    def push(one: object) -> None:
        tracemalloc.start()
        try:
            decode(one)
            most.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    most: list[int] = []
    push()
    return max(most)


@pytest.mark.parametrize("case", CASES)
def test_malformed_input_is_one_line_and_takes_little_memory(case):
    assert pushed(case, 25) < 2**21


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_much_malformed_input_is_one_line_and_takes_little_memory(case):
    assert pushed(case, 20_000) < 2**22


@pytest.mark.parametrize(
    "tensor",
    [
        ["G", "float64", [2**32, 2**32], [0, 1]],
        ["G", "float64", [2**62, 4], [0, 1]],
        ["G", "float64", [0, 2**50], [0, 1]],
        ["G", "float64", [-1, -8], [0, 1]],
        ["G", "float64", [1] * 10**5, list(range(10**5))],
        ["G", "Tensor", [1], [0]],
        ["G", "bool", [8], [0]],
        [["G"], "float64", [1], [0]],
    ],
)
def test_shapes_that_no_tensor_has_are_refused_before_there_is_one(tensor):
    """2^32 x 2^32 numbers are 0 in 64 bits: torch made a tensor of that shape without any memory behind it."""
    blob = packed(Message({"G": torch.full((1,), 3.0).double()}))
    header = header_of(blob)
    header["tensors"] = [tensor]
    with pytest.raises(UserError):
        unpacked(with_header(blob, header))


def test_lengths_take_no_memory_before_bytes_come():
    for announced in (2**62, 2**40, frames._LONGEST_HEADER - 1):
        tracemalloc.start()
        reads_frame(announced.to_bytes(8, "little") + b"{}")
        reads_frame(frame_of({}, [announced]))
        assert tracemalloc.get_traced_memory()[1] < 2**21
        tracemalloc.stop()
    nested = b"[" * 100_000
    with pytest.raises(UserError):
        unpacked(len(nested).to_bytes(8, "little") + nested)
    reads_frame(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(UserError, match="has a header of"):
        unpacked(LONGEST_HEADER.to_bytes(8, "little") + bytes(LONGEST_HEADER))


def test_a_received_answer_of_another_kind_is_no_reply():
    with pytest.raises(UserError, match="a reply was expected, and saved came"):
        deserialise_reply(Received("saved", {}, MESSAGE))
