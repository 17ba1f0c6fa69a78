"""A run's folder: written whole or not at all, found by its id, verified before it is used."""

from __future__ import annotations

import csv
import functools
import logging
import math
import os
import pickle
import re
import shutil
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import yaml

from fcl_bench.config import YAML_DUMPER, YAML_LOADER, target_class
from fcl_bench.errors import UserError
from fcl_bench.files import (
    csv_cell,
    file_checksum,
    json_hash,
    read_json,
    regular,
    remove,
    replacing,
    user_path,
    write_json,
)
from fcl_bench.typed import typed_instance

if TYPE_CHECKING:
    import torch

    from fcl_bench.data.partitions.base import Holdings
    from fcl_bench.data.splits.base import Stream
    from fcl_bench.engine.checkpoint import Checkpoint
    from fcl_bench.execution.run_json import Result, RunRecord
    from fcl_bench.protocol.method import Method

log = logging.getLogger(__name__)

#: Version of the run folder's files; part of the run id. A change to a method's numbers raises its `revision` instead.
SCHEMA = 5

#: The largest number of client-task pairs whose samples are separate arrays in partition.npz.
SEPARATE = 20_000

#: What reading a damaged or foreign record raises.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)

#: A CSV file: its header and its rows; NaN and None become empty cells.
Table = tuple[Iterable[str], Iterable[Iterable[object]]]


def run_id(identity: Mapping[str, object]) -> str:
    """The id of the run, or of the preview, that `identity` determines."""
    return identity_hash(SCHEMA, identity)[:12]


def identity_hash(schema: int, identity: Mapping[str, object]) -> str:
    """The hash of everything that determines a result, and of the version of its files."""
    return json_hash({"schema": schema, **identity})


class _OtherVersion(ValueError):
    """Another version of fcl-bench wrote the run folder."""


class RunFolder:
    """`<out>/runs/<method>-<data>-<backbone>-<id>/`.

    `run.json` is written last and holds the checksum of every other file, so a folder is complete only if all of it is
    there and undamaged. Until then, `checkpoint` holds the state after the last complete task, or some round since.

    Args:
        run: id of the run that it is for; "" for a reader of whatever run is there.
    """

    def __init__(self, path: Path, run: str = "") -> None:
        self.path = path
        self.run = run

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        """The state of the unfinished run."""
        from fcl_bench.engine.checkpoint import Checkpoint  # only now: who reads complete runs needs no tensors

        return Checkpoint(self.path / "checkpoint", SCHEMA, self.run)

    def complete_record(self, otherwise: str = "running again", read: Container[str] | None = None) -> RunRecord | None:
        """Return the run record, if the run is complete and every file matches its checksum.

        Args:
            otherwise: what the caller does about a damaged folder, for the warning.
            read: the files that the caller goes on to read: of the others only their presence is checked, since models
                take long to read; None: all.
        """
        if not (self.path / "run.json").exists():
            return None
        record, trouble = self.checked(read=read)
        if trouble:
            log.warning("run folder %s%s; %s", self.path, trouble, otherwise)
        return record

    def verified(self, names: Collection[str] | None = None, read: Container[str] | None = None) -> RunRecord:
        """The record of a complete run; see `checked`.

        Raises:
            UserError: the record is damaged, or one of the files is damaged or not there.
        """
        record, trouble = self.checked(names, read)
        if record is None:
            raise UserError(f"run folder {self.path}{trouble}", "the run's command again redoes it")
        return record

    def checked(
        self, names: Collection[str] | None = None, read: Container[str] | None = None
    ) -> tuple[RunRecord | None, str]:
        """The record if it and its files `names` (None: all) are as they were written; otherwise None and what is not.

        Of files that are not in `read` (None: all) only the presence is checked.
        """
        try:
            record = self._record()
            files = record["files"]
            if damaged := [name for name in names or files if not self._holds(name, files[name], read)]:
                return None, f" is damaged: {', '.join(damaged)} does not match its checksum"
        except FileNotFoundError as error:
            return None, f" lacks {error.filename}"
        except _OtherVersion as error:
            return None, f" is of another version: {error}"
        except _DAMAGE as error:
            return None, f" is damaged: it has a damaged run.json ({error})"
        return record, ""

    def _record(self) -> RunRecord:
        """The record alone. Raises one of `_DAMAGE` unless this version wrote it, for this run."""
        record = cast("RunRecord", read_json(self.path / "run.json"))
        if record["schema"] != SCHEMA:
            raise _OtherVersion(f"{record['schema']}, not {SCHEMA}")
        if self.run not in ("", record["run_id"]) or not isinstance(record["run_id"], str):
            raise ValueError(f"of another run, {record['run_id']}")
        for name in record["files"]:
            # A record from elsewhere may name any file.
            if name in ("", ".", "..") or os.path.basename(name) != name:
                raise ValueError(f"{name!r} is no file of the folder")
        return record

    def config(self) -> dict[str, Any]:
        """The resolved configuration; the file holds no interpolation, so OmegaConf is not needed."""
        # Each top-level key on its own: many runs share most of them, and parsing takes longer than all other reading.
        content = (self.path / "config.yaml").read_text()
        # What one key names by an anchor another one may mean.
        whole = re.search(r"[:-] [&*]\w", content)
        parts = [content] if whole else re.split(r"^(?=\w)", content, flags=re.MULTILINE)
        found: dict[str, Any] = {}
        for part in parts:
            nested, parsed = _parsed(part)
            found |= pickle.loads(parsed) if nested else parsed
        return found

    def _holds(self, name: str, checksum: str, read: Container[str] | None = None) -> bool:
        """Whether a file is as it was written. Raises OSError if it does not exist or is not a file."""
        # A text: collecting thousands of runs asks this so often that making each `Path` would take as long again.
        place = f"{self.path}/{name}"
        if read is None or name in read:
            return file_checksum(place) == checksum
        return os.stat(regular(place)).st_size >= 0

    def clear(self, keep_checkpoint: bool = False) -> None:
        """Delete everything but the log: a complete run (force), or the remains of a killed or damaged one."""
        preserved = {"run.log", self.checkpoint.folder.name} if keep_checkpoint else {"run.log"}
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if entry.name not in preserved:
                remove(entry)

    def remove_if_empty(self) -> None:
        """Delete the folder of a run that was refused before it had anything but its log."""
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= {"run.log"}:
            shutil.rmtree(self.path)

    def write(
        self,
        record: Result,
        config: dict[str, Any],
        tables: dict[str, Table],
        archives: dict[str, dict[str, np.ndarray]],
        model: tuple[dict[str, torch.Tensor], dict[str, Any]],
        others: dict[str, bytes],
    ) -> RunRecord:
        """Write every file, then run.json; returns what that holds.

        Args:
            archives: file name of an .npz -> its arrays by name.
            model: its tensors by name, and what it says of itself.
        """
        from fcl_bench.execution.model_file import write_model

        with replacing(self.path / "config.yaml") as temporary:
            temporary.write_text(yaml.dump(config, Dumper=YAML_DUMPER, sort_keys=False, allow_unicode=True))
        for name, (header, rows) in tables.items():
            with replacing(self.path / name) as temporary, temporary.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(map(csv_cell, header))
                writer.writerows(map(_cell, row) for row in rows)
        for name, arrays in archives.items():
            with replacing(self.path / name) as temporary:
                np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
        write_model(self.path / "model.safetensors", *model)
        for name, content in others.items():
            with replacing(self.path / name) as temporary:
                temporary.write_bytes(content)
        names = ["config.yaml", *tables, *archives, "model.safetensors", *others]
        checksums = {name: file_checksum(self.path / name) for name in names}
        written = write_json(self.path / "run.json", {**record, "files": checksums})
        if not config["transport"].get("withdrawal"):
            self.checkpoint.remove()
        return cast("RunRecord", written)


@functools.lru_cache(maxsize=4096)
def _parsed(part: str) -> tuple[bool, Any]:
    """Whether values are nested, and the mapping: these pickled, so that each reader gets objects of its own."""
    found = yaml.load(part, Loader=YAML_LOADER) or {}
    nested = any(isinstance(value, dict | list) for value in found.values())
    return nested, pickle.dumps(found) if nested else found


def ignores_partition(config: Mapping[str, Any]) -> bool:
    """Whether beta, `clients` and the partition change no more than the rounding of a run's result.

    A `UserError` says that the method's class cannot be imported.
    """
    # Each of these goes by client: who answers, what is noised, who counts, which samples have a label or are held out.
    plain = all(config[group]["_target_"].endswith(".NoOption") for group in ("adapt", "faults", "noise"))
    robust = config.get("robust_groups") or config.get("client_share", 1) != 1
    if not plain or robust or config["label_rate"] != 1 or config["data"].get("validation"):
        return False
    knobs = {name: value for name, value in config["method"].items() if name != "_target_"}
    method: Method = typed_instance(target_class("method", config["method"]["_target_"]), knobs, "method")
    return method.ignores_partition


def _cell(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else csv_cell(value)


def partition_arrays(stream: Stream, shards: Sequence[Holdings], labelled: np.ndarray) -> dict[str, np.ndarray]:
    """`class_order` and indices into the data set: `train_t<t>_c<k>`, `test_t<t>`, `unlabelled`; t, k from 0.

    With `data.validation` also `validation_t<t>`, indices of training samples; `data.test=false` has no `test_t<t>`.

    Above `SEPARATE` client-task pairs: `train_t<t>` with the samples of one client after the other, and
    `train_ends_t<t>` (K + 1,): client k has `train_t<t>[train_ends_t<t>[k]:train_ends_t<t>[k + 1]]`. One file per
    client and task in the archive would be ten million files of 300 bytes each, most of them without a sample.
    """
    arrays = {"class_order": stream.class_order, "unlabelled": np.flatnonzero(~labelled)}
    separate = sum(map(len, shards)) <= SEPARATE
    for task, (clients, test) in enumerate(zip(shards, stream.test, strict=True)):
        if stream.validation:
            arrays[f"validation_t{task}"] = stream.validation[task]
        if test is not (stream.validation[task] if stream.validation else None):
            arrays[f"test_t{task}"] = test
        if separate:
            arrays.update({f"train_t{task}_c{client}": indices for client, indices in enumerate(clients)})
        else:
            arrays |= {f"train_t{task}": clients.indices, f"train_ends_t{task}": clients.ends}
    return arrays


#: Fewer characters of an id would match too many runs.
_SHORTEST = 4


def run_folder(given: str | Path, out: str | Path = "outputs") -> Path:
    """Return the folder of a complete run.

    Args:
        given: the folder, a file in it, the folder's name, or the run's id (its first letters are enough).
        out: the folder in which runs are looked for by name or id: OUT/runs, and OUT/quick/runs.

    Raises:
        UserError: no run matches, or several do.
    """
    path = user_path("run", str(given))
    if path.exists():
        folder = path if path.is_dir() else path.parent
        if not (folder / "run.json").is_file():
            raise UserError(f"{given} holds no complete run", "a folder below outputs/runs, with its run.json")
        return folder
    root = user_path("out", str(out))
    files = [*root.glob("runs/*/run.json"), *root.glob("quick/runs/*/run.json")]
    found = sorted(file.parent for file in files if _named(file.parent.name, str(given)))
    if not found:
        raise UserError(f"no complete run {given} in {root / 'runs'}", "a run's folder, or its id and out=FOLDER")
    if len(found) > 1:
        raise UserError(f"{given} fits {len(found)} runs", ", ".join(folder.name for folder in found[:8]))
    return found[0]


def _named(name: str, given: str) -> bool:
    return name == given or (len(given) >= _SHORTEST and name.rpartition("-")[2].startswith(given))
