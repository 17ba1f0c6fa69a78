"""What clients keep, on the disk of the process in which they live: saved and restored with the server's checkpoint."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from fcl_bench.engine.checkpoint import Checkpoint
from fcl_bench.errors import UserError

#: Version of what is stored.
_SCHEMA = 1
#: What stands in the server's checkpoint in place of the clients' states: the name of what they saved beside it.
ELSEWHERE = "elsewhere"


class Keeper:
    """The states of one process's clients, one folder per save: `<folder>/<tag>/<process>/`.

    A process saves before the server does, so it keeps what it saved last, too: the server may be killed in between.

    Args:
        folder: of all processes; they may share it, or have one each under the same name.
        owner: identity of what is under way; what another one left is not taken over.
        process: name of this process.
    """

    def __init__(self, folder: Path, owner: str, process: str = "all") -> None:
        self.folder = folder
        self._owner, self._process = owner, process
        self._last = ""

    def save(self, tag: str, clients: Collection[int], states: dict[str, torch.Tensor]) -> None:
        """Keep the states (`<client>.<name>`) of these clients under `tag`."""
        self._checkpoint(tag, self._process).save({"clients": sorted(clients)}, states)
        for old in self.folder.iterdir():
            if old.name not in (tag, self._last):
                shutil.rmtree(old / self._process, ignore_errors=True)
                # Whichever process is the last one that leaves it.
                with contextlib.suppress(OSError):
                    old.rmdir()
        self._last = tag

    def restore(self, tag: str, clients: Collection[int]) -> dict[str, torch.Tensor]:
        """The states of these clients, whichever process kept them.

        Raises:
            UserError: some are not here.
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
            found |= {name: value for name, value in tensors.items() if int(name.partition(".")[0]) in own}
        if missing:
            raise UserError(
                f"{self.folder / tag} lacks what {len(missing)} clients kept, client {min(missing)} for one",
                "the folder from where the run was, or force=true to start anew",
            )
        self._last = tag
        return found

    def forget(self) -> None:
        """The run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _checkpoint(self, tag: str, process: str) -> Checkpoint:
        return Checkpoint(self.folder / tag / process, _SCHEMA, self._owner, otherwise="it is left alone")


def new_tag(task: int, round_: int) -> str:
    """The name of what is saved after a round. No other save has it, not even of the same round of a run done anew."""
    return f"task-{task}-round-{round_}-{uuid.uuid4().hex}"


def tag_of(states: Mapping[str, torch.Tensor]) -> str:
    """The name under which clients saved, from the server's checkpoint; "": their states are in the checkpoint."""
    return bytes(states[ELSEWHERE].tolist()).decode() if ELSEWHERE in states else ""


def as_state(tag: str) -> dict[str, torch.Tensor]:
    """What the server's checkpoint keeps of a save."""
    return {ELSEWHERE: torch.tensor(list(tag.encode()), dtype=torch.uint8)}


def resolved(
    states: dict[str, torch.Tensor], clients: Collection[int], keeper: Keeper | None
) -> dict[str, torch.Tensor]:
    """The states of these clients, from the server's checkpoint or from where they were saved.

    Raises:
        UserError: they were saved elsewhere, and are not to be found.
    """
    if not (tag := tag_of(states)):
        own = frozenset(clients)
        return {name: value for name, value in states.items() if int(name.partition(".")[0]) in own}
    if keeper is None:
        raise UserError("what the clients keep was saved by processes of theirs", "the same transport as before")
    return keeper.restore(tag, clients)
