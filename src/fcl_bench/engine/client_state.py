"""Client states on the disk of the process in which clients live, saved and restored with the server's checkpoint."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from fcl_bench.engine.checkpoint import Checkpoint
from fcl_bench.errors import UserError

#: Version of the stored form.
_SCHEMA = 1
#: The entry of the server's checkpoint in place of the clients' states: the name under which they saved them.
ELSEWHERE = "elsewhere"


class ClientStore:
    """The states of one process's clients, one folder per save: `<folder>/<tag>/<process>/`.

    Args:
        folder: the folder of all processes; they may share it, or have one each under the same name. Only this user
            may read it, since states may hold raw samples.
        owner: identity of the work under way; states that another owner left are not used.
        process: name of this process.
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
        return Checkpoint(self.folder / tag / process, _SCHEMA, self._owner, otherwise="it is left alone")


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
