"""The saved state of unfinished work: tensors and JSON, whole or absent, verified before it is used."""

from __future__ import annotations

import contextlib
import logging
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fcl_bench.errors import UserError
from fcl_bench.files import (
    Hash,
    appending,
    content_hash,
    file_checksum,
    read_json,
    regular,
    remove_leftovers,
    replacing,
    write_json,
)

log = logging.getLogger(__name__)


#: Tensors of a run's state whose names start with this only ever gain rows, so each row is written once.
GROWING = "rows."
#: Version of the files below; a checkpoint of another version is not used, and the run starts from its first task.
FORMAT = 7
#: Version of the clients' states in their own checkpoints.
_CLIENTS = 1
#: The entry of the server's checkpoint in place of the clients' states: the name under which they saved them.
ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class _Grown:
    """The contents of a file of rows so far.

    Attributes:
        size: their bytes; anything beyond them in the file belongs to a state that was never completed.
    """

    file: str = ""
    rows: int = 0
    size: int = 0
    digest: Hash = field(default_factory=content_hash)


class Checkpoint:
    """A folder with `state.json` and the files that it names; a new state replaces the old one atomically.

    A state is JSON and tensors. Tensors whose names start with `GROWING` only ever gain rows, so each has its own file
    to which the new rows are appended: a whole run writes each of their rows once. All other tensors are rewritten with
    each state, in one file.

    Args:
        owner: identity of the work under way; a state that another owner left is not used.
        otherwise: what the caller does about a checkpoint that can't be used, for warnings.
    """

    def __init__(
        self, folder: Path, schema: int, owner: str = "", otherwise: str = "starting from the first task"
    ) -> None:
        self.folder = folder
        self._otherwise = otherwise
        self._schema, self._owner = schema, owner
        #: Per growing tensor, its file and the part of it that belongs to the last state saved or loaded.
        self._grown: dict[str, _Grown] = {}
        #: The file of the other tensors of that state; "" if there is none.
        self._tensors = ""

    def save(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Save `state` (JSON) and `tensors`. Only the process that holds the lock of the saved work may call this."""
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
        write_json(self.folder / "state.json", {**state, **header})
        self._grown, self._tensors = grown, file.name
        self.tidy()

    def tidy(self) -> None:
        """Remove files of states other than the one last saved or loaded; a killed process leaves such files."""
        named = {self._tensors, *(done.file for done in self._grown.values())}
        for file in self._tensor_files():
            if file.name not in named:
                file.unlink()

    def _tensor_files(self) -> list[Path]:
        return [*self.folder.glob("tensors-*.safetensors"), *self.folder.glob("rows-*.bin")]

    def _add(self, name: str, tensor: torch.Tensor, number: int) -> _Grown:
        """Append a growing tensor's new rows to its file; a new file is begun if the old one can't be continued."""
        done = self._grown.get(name)
        if done is None or len(tensor) < done.rows:
            done = _Grown(f"rows-{name.removeprefix(GROWING)}-{number}.bin")
        new = tensor[done.rows :].cpu().contiguous().numpy().reshape(-1).view(np.uint8).data
        digest = done.digest.copy()
        digest.update(new)
        # Write from the end of the last state's rows: a process killed since then may have left more bytes.
        with appending(self.folder / done.file, done.size) as file:
            file.write(new)
        return _Grown(done.file, len(tensor), done.size + len(new), digest)

    def load(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """What `save` kept; None if there is nothing, or it is damaged, of another schema or of another owner."""
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
            # Set only now, because damaged files must not be continued.
            self._grown, self._tensors = {name: done for name, (_, done) in read.items()}, tensors.name
            return state, {**whole, **{name: rows for name, (rows, _) in read.items()}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            log.warning("checkpoint %s is damaged (%s); %s", self.folder, error, self._otherwise)
            return None

    def _read(self, entry: dict[str, Any]) -> tuple[torch.Tensor, _Grown]:
        """A growing tensor, and the state of its file. Raises ValueError if the file does not match its checksum."""
        file = regular(self.folder / entry["file"])
        content = np.fromfile(file, dtype=np.uint8, count=min(entry["size"], file.stat().st_size))
        digest = content_hash(content.data)
        if digest.hexdigest() != entry["checksum"]:
            raise ValueError(f"{entry['file']} does not match its checksum")
        rows = torch.from_numpy(content.view(entry["dtype"]).reshape(entry["shape"]))
        return rows, _Grown(entry["file"], len(rows), entry["size"], digest)

    def remove(self) -> None:
        if self.folder.is_symlink():  # of which rmtree deletes nothing
            self.folder.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._grown, self._tensors = {}, ""


def for_disk(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as safetensors requires them: on the CPU, contiguous, none sharing memory with another.

    A tensor is copied only if necessary: a model's largest matrix is as large as everything else that a run holds.

    Raises:
        UserError: one of them is no tensor.
    """
    made: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(
                f"{name}, which a method gave to be saved, is of the type {type(tensor).__name__}",
                "tensors from state_dict, statistics and model, such as torch.tensor(3)",
            )
        plain = tensor.detach().cpu()
        memory = plain.untyped_storage()
        if plain.is_contiguous() and memory.nbytes() == plain.nbytes and memory.data_ptr() not in seen:
            made[name] = plain
            seen.add(memory.data_ptr())
        else:
            made[name] = plain.clone(memory_format=torch.contiguous_format)
    return made


class ClientStore:
    """The states of one process's clients, one folder per save: `<folder>/<tag>/<process>/`.

    Args:
        folder: the folder of all processes; they may share it, or have one each under the same name. Only this user
            may read it, since states may hold raw samples.
        owner: identity of the work under way; states that another owner left are not used.
    """

    def __init__(self, folder: Path, owner: str, process: str = "all") -> None:
        self.folder = folder
        self._owner, self._process = owner, process

    def save(self, tag: str, clients: Collection[int], states: dict[str, torch.Tensor]) -> None:
        """Save the states (`<client>.<name>`) of these clients under `tag`."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._checkpoint(tag, self._process).save({"clients": sorted(clients)}, states)

    def prune(self, tags: Collection[str | None]) -> None:
        """Delete this process's saves except those under `tags`."""
        for place in self.folder.glob(f"*/{self._process}"):
            if place.parent.name not in tags:
                shutil.rmtree(place, ignore_errors=True)
                # Only the last process that leaves the folder can remove it.
                with contextlib.suppress(OSError):
                    place.parent.rmdir()

    def restore(self, tag: str, clients: Collection[int]) -> dict[str, torch.Tensor]:
        """The states of these clients, whichever process saved them.

        Raises:
            UserError: some are not here, or damaged.
        """
        found: dict[str, torch.Tensor] = {}
        missing = set(clients)
        for place in sorted((self.folder / tag).glob("*/")):
            loaded = self._checkpoint(tag, place.name).load()
            if loaded is None:
                continue
            state, tensors = loaded
            own = missing & set(state["clients"])
            missing -= own
            found |= of_clients(tensors, own)
        if missing:
            raise UserError(
                f"{self.folder / tag} lacks what {len(missing)} clients stored, client {min(missing)} for one",
                "the folder from where the run was, with the files of all its processes, or force=true to start anew",
            )
        return found

    def delete(self) -> None:
        """Delete all saved states, when the run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _checkpoint(self, tag: str, process: str) -> Checkpoint:
        return Checkpoint(self.folder / tag / process, _CLIENTS, self._owner, otherwise="it is left alone")


def new_tag(task: int, round_: int) -> str:
    """A new name for a save after a round. It is unique: the same round of a repeated run gets another name."""
    return f"task-{task}-round-{round_}-{uuid.uuid4().hex}"


def text_tensor(text: str) -> torch.Tensor:
    """(n,) uint8: a text among the tensors of a checkpoint."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def tensor_text(tensor: torch.Tensor) -> str:
    """What `text_tensor` was given."""
    return bytes(tensor.tolist()).decode()


def as_state(tag: str) -> dict[str, torch.Tensor]:
    """The entry for a save in the server's checkpoint."""
    return {ELSEWHERE: text_tensor(tag)}


def tag_of(states: Mapping[str, torch.Tensor]) -> str:
    """The name of the clients' save, from the server's checkpoint; "": the checkpoint itself has their states."""
    return tensor_text(states[ELSEWHERE]) if ELSEWHERE in states else ""


def of_clients(states: Mapping[str, torch.Tensor], clients: Collection[int]) -> dict[str, torch.Tensor]:
    """The states (`<client>.<name>`) of these clients alone."""
    wanted = frozenset(map(str, clients))
    return {name: value for name, value in states.items() if name.partition(".")[0] in wanted}


def resolved(
    states: dict[str, torch.Tensor], clients: Collection[int], store: ClientStore | None
) -> dict[str, torch.Tensor]:
    """The states of these clients, from the server's checkpoint or from where they were saved.

    Raises:
        UserError: they were saved elsewhere and cannot be found.
    """
    if not (tag := tag_of(states)):
        return of_clients(states, clients)
    if store is None:
        raise UserError("what the clients stored was saved by processes of theirs", "the same transport as before")
    return store.restore(tag, clients)
