"""The decoders that are fuzzed: how malformed input for each is made, and how each reads it."""

from __future__ import annotations

import json
import logging
import os
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.faults.scenarios import fresh
from benchmarks.fuzz.mutating import array_of, bytes_of, json_of, npz_of, text_of
from fcl_bench.engine.checkpoint import Checkpoint, as_state
from fcl_bench.engine.exchange import Arrival
from fcl_bench.engine.remote.replies import RemoteError, deserialise, deserialise_reply, serialise_reply
from fcl_bench.engine.validation import validate_upload
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash, file_checksum, write_json
from fcl_bench.flower import frames
from fcl_bench.flower.node_registry import NodeInfo, NodeRegistry
from fcl_bench.protocol.fields import SampleCounts
from fcl_bench.protocol.message import Message
from tests.engine.remote.test_fuzz import INFO, REPLY, frame_of, header_of, with_header


class Target(ABC):
    """A decoder.

    Attributes:
        share: of a million inputs.
        refusals: what it may raise; the message has to be one printable line.
    """

    name: ClassVar[str]
    share: ClassVar[int]
    #: Bytes that a process of inputs may take beyond its own.
    room: ClassVar[int] = 512 << 20
    refusals: ClassVar[tuple[type[Exception], ...]] = (UserError,)

    def __init__(self, scratch: Path) -> None:
        self.scratch = fresh(scratch / self.name.replace(" ", "-"))
        self.scratch.mkdir(parents=True)

    @abstractmethod
    def drawn(self, rng: random.Random) -> Any:
        """One malformed input."""

    @abstractmethod
    def read(self, given: Any) -> object:
        """Read it as the program does."""


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


class _OfFile(Target):
    """A file of the user's."""

    suffix: ClassVar[str]

    def read(self, given: bytes) -> object:
        path = self.scratch / f"input{self.suffix}"
        path.write_bytes(given)
        return self.opened(path)

    @abstractmethod
    def opened(self, path: Path) -> object:
        """Read the file."""


class Features(_OfFile):
    """Feature files."""

    name, share, suffix = "features", 15_000, ".npz"

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        rng = np.random.default_rng(0)
        self._good = {
            **{f"x_{side}": rng.standard_normal((4, 3)).astype(np.float32) for side in ("train", "test")},
            **{"y_train": np.array([0, 1, 0, 1]), "y_test": np.array([1, 0, 1, 0])},
        }

    def drawn(self, rng: random.Random) -> bytes:
        good = self._good
        if rng.random() < 0.3:
            good = good | {f"y_{side}": np.array(["a", "b", "a", "b"]) for side in ("train", "test")}
        return npz_of(rng, good)

    def opened(self, path: Path) -> object:
        from fcl_bench.data.sources.array_files import FeatureFile
        from fcl_bench.data.sources.base import loaded

        return loaded(FeatureFile(path=str(path))).fingerprint


class Sites(Features):
    """A site's samples."""

    name, share, suffix = "sites", 8_000, ".npz"

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        counts = np.array([0, 1, 0, 1])
        self._good = {"x": np.ones((4, 3)), "column": counts, "task": counts, "labelled": counts > 0}

    def drawn(self, rng: random.Random) -> bytes:
        return npz_of(rng, self._good)

    def opened(self, path: Path) -> object:
        from fcl_bench.data.sources.array_files import SiteFile

        return SiteFile(path=str(path)).read().fingerprint


class Checkpoints(Target):
    """A run's state: JSON, tensors and rows, sealed again after the change; what is damaged is told and not used."""

    name, share, refusals = "checkpoints", 6_000, ()

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self._folder = self.scratch / "checkpoint"
        self._folder.mkdir()
        tensors = {"a": torch.ones(2, 3), "rows.uploads": torch.arange(6).reshape(3, 2), **as_state("task-0")}
        Checkpoint(self._folder, 1, "me").save({"task": 1, "clients": [0, 1]}, tensors)
        self._state = json.loads((self._folder / "state.json").read_text())
        self._good = {file.name: file.read_bytes() for file in self._folder.iterdir()}

    def drawn(self, rng: random.Random) -> dict[str, bytes]:
        files = dict(self._good)
        damaged = rng.choice([*files])
        files[damaged] = bytes_of(rng, files[damaged])
        state = self._state
        if rng.random() < 0.7:  # sealed again
            sealed = self.scratch / "sealed.json"
            if rng.random() < 0.6:
                files = {**self._good, **({} if rng.random() < 0.5 else files)}
                state = json_of(rng, self._state)
            if isinstance(state, dict):
                for name, content in files.items():
                    state = _replaced(state, file_hash(self._good[name]), file_hash(content))
                state.pop("checksum", None)
                try:
                    write_json(sealed, state)
                except ValueError:  # NaN
                    return files
                files["state.json"] = sealed.read_bytes()
        return files

    def read(self, given: dict[str, bytes]) -> object:
        for name, content in given.items():
            (self._folder / name).write_bytes(content)
        return Checkpoint(self._folder, 1, "me").load()


def file_hash(content: bytes) -> str:
    """What `file_checksum` gives for a file with this content."""
    return content_hash(content).hexdigest()


def _replaced(state: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state).replace(old, new))
    return found


class Runs(Target):
    """run.json, config.yaml and tasks.csv of a run, sealed again after the change, as tables read them."""

    name, share, refusals = "runs", 1_000, ()

    def __init__(self, scratch: Path) -> None:
        from tests.small_runs import run_in

        super().__init__(scratch)
        self._folder = run_in(self.scratch, "method=afl", "method.M=8", "data=digits", "clients=2", "tasks=2").folder
        self._record = json.loads((self._folder / "run.json").read_text())
        self._kept = {name: (self._folder / name).read_text() for name in ("config.yaml", "tasks.csv")}

    def drawn(self, rng: random.Random) -> dict[str, Any]:
        record, files = json_of(rng, self._record), {}
        if rng.random() < 0.3:
            name = rng.choice([*self._kept])
            record, files = self._record, {name: text_of(rng, self._kept[name])}
        return {"record": record, "files": files}

    def read(self, given: dict[str, Any]) -> object:
        from fcl_bench.results.collect import collect

        for name, content in self._kept.items():
            (self._folder / name).write_bytes(given["files"].get(name, content.encode()))
        record = given["record"]
        if not isinstance(record, dict):
            (self._folder / "run.json").write_text(json.dumps(record))
            return collect(self._folder.parent)
        if given["files"]:
            checksums = {name: file_checksum(self._folder / name) for name in given["files"]}
            record = {**record, "files": {**record["files"], **checksums}}
        try:
            write_json(self._folder / "run.json", record)
        except ValueError:  # NaN
            (self._folder / "run.json").write_text(json.dumps(record))
        return collect(self._folder.parent)


class Models(_OfFile):
    """Saved models."""

    name, share, suffix = "models", 7_000, ".safetensors"

    def __init__(self, scratch: Path) -> None:
        from fcl_bench.execution.model_file import write_model

        super().__init__(scratch)
        path = self.scratch / "good.safetensors"
        write_model(path, {"W": torch.ones(3, 2)}, {"format": 1, "tasks": []})
        self._good = path.read_bytes()

    def drawn(self, rng: random.Random) -> bytes:
        size = int.from_bytes(self._good[:8], "little")
        if rng.random() < 0.5:
            return bytes_of(rng, self._good)
        text = json.dumps(json_of(rng, json.loads(self._good[8 : 8 + size]))).encode()
        return len(text).to_bytes(8, "little") + text + self._good[8 + size :]

    def opened(self, path: Path) -> object:
        from fcl_bench.execution.model_file import read_model

        return read_model(path, torch.device("cpu"))


class SplitFiles(_OfFile):
    """split.file: which client gets which sample when."""

    name, share, suffix = "split files", 1_200, ".csv"
    good = "\n".join(["sample,client,step", *(f"{number},{number % 3},{number % 2}" for number in range(20))])

    def drawn(self, rng: random.Random) -> bytes:
        return text_of(rng, self.good)

    def opened(self, path: Path) -> object:
        from fcl_bench.data.splits.asynchronous import Asynchronous

        return Asynchronous(file=str(path))._read(20, 3, 2)


class Policies(_OfFile):
    """Policies of sites."""

    name, share, suffix = "policies", 1_200, ".yaml"
    good = "methods: [afl, stsa]\nown_data: true\nsmallest_group: 5\nkeep_samples: false\nepsilon: null\npackages: [a]"

    def drawn(self, rng: random.Random) -> bytes:
        return text_of(rng, self.good)

    def opened(self, path: Path) -> object:
        from fcl_bench.flower.policy import Policy

        return Policy.read(str(path))


class Tables(_OfFile):
    """Labelled rows in CSV files."""

    name, share, suffix = "tables", 300, ".csv"
    room = 8 << 30  # the address space of the threads that read it

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        os.environ["HF_DATASETS_CACHE"] = str(self.scratch / "cache")
        rows = [f"{'ab'[number % 2]},{number},{number / 7:.3f},{number % 3}" for number in range(20)]
        self._good = "\n".join(["label,x,y,client", *rows])

    def drawn(self, rng: random.Random) -> bytes:
        return text_of(rng, self._good)

    def opened(self, path: Path) -> object:
        import datasets

        from fcl_bench.data.sources.base import loaded
        from fcl_bench.data.sources.rows import Table

        datasets.config.HF_DATASETS_CACHE = fresh(self.scratch / "cache")
        return loaded(Table(name="table", path=str(path))).fingerprint


class Parquet(Tables):
    """Labelled rows in parquet files."""

    name, share, suffix = "parquet", 300, ".parquet"

    def __init__(self, scratch: Path) -> None:
        import pandas as pd

        super().__init__(scratch)
        path = self.scratch / "good.parquet"
        numbers = np.arange(20)
        pd.DataFrame({"label": numbers % 2, "x": numbers * 1.5, "y": numbers**2}).to_parquet(path)
        self._bytes = path.read_bytes()

    def drawn(self, rng: random.Random) -> bytes:
        return bytes_of(rng, self._bytes)


TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        *(Replies, Frames, Records, Nodes, Codes, Uploads, Features, Sites, Checkpoints, Runs, Models),
        *(SplitFiles, Policies, Tables, Parquet),
    )
}


def trouble_of(target: Target, given: Any) -> str:
    """What is wrong with how an input is read; "": it is read, or refused in one printable line."""
    try:
        target.read(given)
    except target.refusals as error:
        told = str(error)
        return "" if told.isprintable() and len(told) < 4500 else f"a message that is no line: {told[:200]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    return ""


def quietly(work: Callable[[], int]) -> int:
    """Do `work` while nothing is logged, as what is damaged is told of in warnings."""
    logging.disable(logging.CRITICAL)
    try:
        return work()
    finally:
        logging.disable(logging.NOTSET)


__all__ = ["TARGETS", "Target", "array_of", "quietly", "trouble_of"]
