"""Decoders of what comes from other processes and clients: replies, frames, records, nodes, codes and uploads."""

from __future__ import annotations

import json
import random
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.fuzz.mutating import bytes_of, json_of
from benchmarks.fuzz.target import Target
from fcl_bench.engine.exchange import Arrival
from fcl_bench.engine.remote.replies import RemoteError, deserialise, deserialise_reply, serialise_reply
from fcl_bench.engine.validation import validate_upload
from fcl_bench.errors import UserError
from fcl_bench.flower import frames
from fcl_bench.flower.node_registry import NodeInfo, NodeRegistry
from fcl_bench.protocol.fields import SampleCounts
from fcl_bench.protocol.message import Message
from tests.engine.remote.test_fuzz import INFO, REPLY, frame_of, header_of, with_header


class Replies(Target):
    """Blobs of other processes: JSON heads and tensors."""

    name, share, refusals = "replies", 200_000, (UserError, RemoteError)

    def drawn(self, rng: random.Random) -> bytes:
        kind = rng.randrange(5)
        if kind == 0:
            return rng.randbytes(rng.randint(0, 200))
        if kind == 1:
            return bytes_of(rng, REPLY)
        return with_header(REPLY, json_of(rng, header_of(REPLY)))

    def read(self, given: bytes) -> object:
        reply = deserialise_reply(deserialise(given))
        assert all(tensor.numel() * tensor.itemsize <= len(given) for tensor in reply.upload.values())
        return deserialise_reply(deserialise(serialise_reply(reply)))


class _Line:
    """The part of a socket that frames are read from."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def recv(self, most: int) -> bytes:
        self._at += most
        return self._content[self._at - most : self._at]


class Frames(Target):
    """Frames between Flower's process and ours."""

    name, share, refusals = "frames", 250_000, (ConnectionError,)
    good = frame_of({"do": "push", "node": "7"}, [3])

    def drawn(self, rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return bytes_of(rng, self.good)
        made = json_of(rng, {"header": {"do": "push", "node": "7"}, "lengths": [3, 0]})
        text = json.dumps(made).encode()
        return len(text).to_bytes(8, "little") + text + b"abc"

    def read(self, given: bytes) -> object:
        frame = frames.receive(_Line(given), most=2**16)  # type: ignore[arg-type]
        assert frame is None or sum(map(len, frame.blobs)) <= 2**16
        return frame


class Records(Target):
    """Byte strings in a Flower message; without Flower nothing is tried."""

    name, share, refusals = "records", 20_000, (ValueError,)

    def drawn(self, rng: random.Random) -> bytes:
        return bytes_of(rng, b"".join(struct.pack("<q", length) for length in (2, 3, 4)) + b"abcdefg")

    def read(self, given: bytes) -> object:
        if find_spec("flwr") is None:
            return None
        from flwr.app import Array, ArrayRecord, RecordDict

        from fcl_bench.flower.records import blobs

        return blobs(RecordDict({"blobs": ArrayRecord({"blobs": Array("uint8", (1,), "fcl-bench", given)})}), 2**16)


class Nodes(Target):
    """What a node says of itself."""

    name, share = "nodes", 100_000

    def drawn(self, rng: random.Random) -> Any:
        return json_of(rng, INFO)

    def read(self, given: Any) -> object:
        registry = NodeRegistry(3, 2, lambda info: None)
        info = NodeInfo.read(given if isinstance(given, dict) else {})
        registry.register("1", info)
        assert 0 <= registry.labelled.min() <= registry.samples.max() < 2**31
        return json.dumps(info.record_entry())


class Codes(Target):
    """Coded factors of the Gaussian sketch."""

    name, share, refusals = "codes", 300_000, ()

    def __init__(self, scratch: Path) -> None:
        from fcl_bench.methods.closed_form.algebra.coding import coded

        super().__init__(scratch)
        torch.manual_seed(0)
        self._codes, self._step = coded(torch.randn(40, 6).double(), 0.3)

    def drawn(self, rng: random.Random) -> tuple[bytes, int, int]:
        good = self._codes.numpy().tobytes()
        return bytes_of(rng, good), rng.choice((40, 40, 1, 39, 2**20)), rng.choice((6, 6, 0, 1, 8))

    def read(self, given: tuple[bytes, int, int]) -> object:
        from fcl_bench.methods.closed_form.algebra.coding import decoded

        content, rows, most = given
        codes = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        found = decoded(codes, self._step, rows, most)
        assert found is None or (found.shape[0] == rows and found.shape[1] <= most)
        return found


class _Captured(Exception):
    """Ends a run where an upload is at hand."""


class Uploads(Target):
    """Uploads of methods on different wires, as `validate_upload` decodes and checks them."""

    name, share = "uploads", 90_000
    METHODS: ClassVar[tuple[str, ...]] = (
        *("stsa", "afl", "fedran", "centred_sketch", "gaussian_sketch", "stsa_e", "fedncm", "fedlda", "air"),
        *("fedfecam", "afcl", "centralised_ridge", "fedavg", "fot"),
    )

    def __init__(self, scratch: Path) -> None:
        from tests.conformance.cases import COMPACT, FLOAT32, federation_for, method_of
        from tests.engine.hostile import CLIENT, TASK, tried

        super().__init__(scratch)
        self._sent: list[tuple[Message, Any, Any, SampleCounts, int]] = []
        for name in self.METHODS:
            for wire in (FLOAT32, COMPACT):
                federation = federation_for(method_of(name), wire=wire)

                def kept(upload: Message, expected: Any, federation: Any = federation) -> Any:
                    sizes = [int(federation.transport.samples(task)[0][CLIENT]) for task in range(TASK + 1)]
                    self._sent.append((upload, expected, federation, SampleCounts(sizes[TASK], sum(sizes)), CLIENT))
                    raise _Captured

                try:
                    tried(federation, kept)
                except _Captured:
                    continue

    def drawn(self, rng: random.Random) -> Any:
        upload, *others = rng.choice(self._sent)
        tensors = dict(upload.tensors)
        for _ in range(rng.randint(1, 2)):
            if tensors:
                name = rng.choice([*tensors])
                tensors[name] = _tensor_of(rng, tensors[name])
                if rng.random() < 0.1:
                    tensors[rng.choice(("x", "\x1b[2J", f"{name}::held", f"{name}::packed", f"{name}::scale", ""))] = (
                        tensors.pop(name) if rng.random() < 0.5 else tensors[name]
                    )
        return upload.with_tensors(tensors), *others

    def read(self, given: Any) -> object:
        upload, expected, federation, announced, client = given
        arrival = Arrival(client, upload, announced)
        return validate_upload(arrival, expected, federation._middleware, federation.server)


def _tensor_of(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor in place of one."""
    kind = rng.randrange(6)
    if kind < 2 and tensor.numel():
        made = tensor.contiguous().clone()
        content = made.view(-1).view(torch.uint8)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        return made
    if kind == 2:
        return tensor.to(rng.choice((torch.float64, torch.float16, torch.int8, torch.int64, torch.bool, torch.uint8)))
    if kind == 3:
        return tensor.new_zeros(rng.choice(((), (0,), (1,), (3, 0), (2, 2, 2), (7,), (5, 1), tuple(tensor.shape))))
    if kind == 4 and tensor.is_floating_point():
        return tensor * rng.choice((-1, 0, 1e4, 1e-30, float("nan"), float("inf"), 0.999))
    return tensor[..., :1] if tensor.ndim else tensor.reshape(1)
