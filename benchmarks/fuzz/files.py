"""Decoders of files: the program's own, sealed again after a change, and those of users."""

from __future__ import annotations

import json
import os
import random
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.faults.scenarios import fresh
from benchmarks.fuzz.mutating import bytes_of, json_of, npz_of, text_of
from benchmarks.fuzz.target import Target
from fcl_bench.engine.checkpoint import Checkpoint, as_state
from fcl_bench.files import content_hash, file_checksum, write_json


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
