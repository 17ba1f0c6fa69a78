"""The state of unfinished work: tensors and JSON, whole or absent, verified before it is trusted."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fcl_bench.files import (
    Hash,
    appending,
    content_hash,
    file_checksum,
    json_hash,
    regular,
    remove_leftovers,
    replacing,
)

log = logging.getLogger(__name__)


#: Tensors of a run's state whose names start so only ever gain rows, so that each row is written once.
GROWING = "rows."
#: Version of the files below; a checkpoint of another one is left alone, and the run starts from its first task.
FORMAT = 6


@dataclass(frozen=True)
class _Grown:
    """What a file of rows holds so far.

    Attributes:
        file: its name; "" for none yet.
        rows: how many.
        size: their bytes; what a file holds beyond them is of a state that was never completed.
        digest: the hash of these bytes, to go on with.
    """

    file: str = ""
    rows: int = 0
    size: int = 0
    digest: Hash = field(default_factory=content_hash)


class Checkpoint:
    """A folder with `state.json` and the files that it names; a new state replaces the old one at once.

    A state is JSON and tensors. Those whose names start with `GROWING` only ever gain rows, so each has a file of its
    own to which the new rows are added: what a whole run writes of them is what it has of them at its end. All others
    are written anew, in one file.

    Args:
        folder: made when something is saved.
        schema: version of what is saved; another one is not taken over.
        owner: identity of what is under way here; what another one left is not taken over.
        otherwise: what the caller does about a checkpoint that can't be used, for warnings.
    """

    def __init__(
        self, folder: Path, schema: int, owner: str = "", otherwise: str = "starting from the first task"
    ) -> None:
        self.folder = folder
        self._otherwise = otherwise
        self._schema, self._owner = schema, owner
        #: Per growing tensor, its file and what of it belongs to the last state saved or loaded.
        self._grown: dict[str, _Grown] = {}
        #: The file of the other tensors of that state; "" for none.
        self._tensors = ""

    def save(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Keep `state` (JSON) and `tensors`. Only one process at a time may: whoever holds the lock of what is kept."""
        for name in ("state.json", "tensors.safetensors"):
            remove_leftovers(self.folder / name)
        number = 1 + max((int(file.stem.rpartition("-")[2]) for file in self._tensor_files()), default=0)
        file = self.folder / f"tensors-{number}.safetensors"
        fixed = {name: tensor for name, tensor in tensors.items() if not name.startswith(GROWING)}
        with replacing(file) as temporary:
            save_file(for_disk(fixed), temporary)
        grown = {name: self._add(name, tensor, number) for name, tensor in tensors.items() if name.startswith(GROWING)}
        header = {
            **{"schema": self._schema, "format": FORMAT, "owner": self._owner},
            **{"tensors": file.name, "tensors_checksum": file_checksum(file)},
            "row_files": {
                name: {
                    **{"file": done.file, "size": done.size, "checksum": done.digest.hexdigest()},
                    **{"shape": list(tensors[name].shape), "dtype": str(tensors[name].dtype).removeprefix("torch.")},
                }
                for name, done in grown.items()
            },
        }
        write_json(self.folder / "state.json", {**header, **state})
        self._grown, self._tensors = grown, file.name
        self.tidy()

    def tidy(self) -> None:
        """Remove the files of other states than the one last saved or loaded: a process that was killed leaves them."""
        named = {self._tensors, *(done.file for done in self._grown.values())}
        for file in self._tensor_files():
            if file.name not in named:
                file.unlink()

    def _tensor_files(self) -> list[Path]:
        return [*self.folder.glob("tensors-*.safetensors"), *self.folder.glob("rows-*.bin")]

    def _add(self, name: str, tensor: torch.Tensor, number: int) -> _Grown:
        """Bring the file of a growing tensor up to it; a file that can't be gone on with is left, for a new one."""
        done = self._grown.get(name)
        if done is None or len(tensor) < done.rows:
            done = _Grown(f"rows-{name.removeprefix(GROWING)}-{number}.bin")
        new = tensor[done.rows :].cpu().contiguous().numpy().reshape(-1).view(np.uint8).data
        digest = done.digest.copy()
        digest.update(new)
        # From the end of what the last state has: a process killed since may have left more.
        with appending(self.folder / done.file, done.size) as file:
            file.write(new)
        return _Grown(done.file, len(tensor), done.size + len(new), digest)

    def load(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """What `save` kept; None where there is none, or it is damaged, of another schema or of another owner."""
        file = self.folder / "state.json"
        self._grown, self._tensors = {}, ""
        if not file.exists():
            return None
        try:
            state = read_json(file)
            if state["schema"] == self._schema and state.get("format") != FORMAT:
                log.warning("checkpoint %s is of another version's form; %s", self.folder, self._otherwise)
                return None
            if state["owner"] != self._owner:
                log.warning("checkpoint %s is of another run; %s", self.folder, self._otherwise)
                return None
            tensors = self.folder / state["tensors"]
            if state["schema"] != self._schema or file_checksum(tensors) != state["tensors_checksum"]:
                raise ValueError("it does not match its checksum or schema")
            read = {name: self._read(entry) for name, entry in state["row_files"].items()}
            whole = load_file(tensors)
            # Only now: what is found to be damaged is not to be gone on with.
            self._grown, self._tensors = {name: done for name, (_, done) in read.items()}, tensors.name
            return state, {**whole, **{name: rows for name, (rows, _) in read.items()}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            log.warning("checkpoint %s is damaged (%s); %s", self.folder, error, self._otherwise)
            return None

    def _read(self, entry: dict[str, Any]) -> tuple[torch.Tensor, _Grown]:
        """A growing tensor, and where to go on. Raises ValueError where the file does not match its checksum."""
        content = np.fromfile(regular(self.folder / entry["file"]), dtype=np.uint8, count=entry["size"])
        digest = content_hash(content.data)
        if digest.hexdigest() != entry["checksum"]:
            raise ValueError(f"{entry['file']} does not match its checksum")
        rows = torch.from_numpy(content.view(entry["dtype"]).reshape(entry["shape"]))
        return rows, _Grown(entry["file"], len(rows), entry["size"], digest)

    def remove(self) -> None:
        """Forget it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._grown, self._tensors = {}, ""


def for_disk(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors wants them: on the CPU, in the plain layout, none sharing memory with another.

    Copies only where that takes one: a model's largest matrix is as large as all else that a run holds.
    """
    made: dict[str, torch.Tensor] = {}
    kept: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu()
        memory = plain.untyped_storage()
        if plain.is_contiguous() and memory.nbytes() == plain.nbytes and memory.data_ptr() not in kept:
            made[name] = plain
            kept.add(memory.data_ptr())
        else:
            made[name] = plain.clone(memory_format=torch.contiguous_format)
    return made


def _checksum(content: Mapping[str, Any]) -> str:
    return json_hash({key: value for key, value in content.items() if key != "checksum"})


def write_json(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write `content` with a checksum of itself; returns what was written."""
    # Through JSON once, so that the checksum is of what a reader will see (lists for tuples, text for keys).
    written: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    written["checksum"] = _checksum(written)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(written, indent=2) + "\n")
    return written


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote. Raises ValueError where it does not match its own checksum, OSError if it is no file."""
    content = json.loads(regular(path).read_text())
    if content["checksum"] != _checksum(content):
        raise ValueError("it does not match its own checksum")
    return content
