"""The states of a node's clients on its disk: one file per client and turn, of which only a few are kept at a time.

With each turn the server says which state it begins with, and which state its own checkpoint continues from. So a node
needs no separate message to save or restore, which would take seconds over Flower, and a turn done twice is one turn.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from fcl_bench.engine.blob import packed, unpacked
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash, remove_leftovers, replacing
from fcl_bench.flower.turns import Tag
from fcl_bench.protocol.context import State
from fcl_bench.protocol.message import Message


class Versions:
    """The states of a node's clients in one run.

    Args:
        folder: of this run, for nobody else to read: it may hold raw samples.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: int, tag: Tag) -> State:
        """Return what a client kept after a turn, on the CPU.

        Raises:
            UserError: it is not here, or damaged.
        """
        path = self._path(client, tag)
        remedy = "the folder as it was (out=...), or force=true on the server to start anew"
        try:
            content = path.read_bytes()
            digest, blob = content[:_DIGEST], content[_DIGEST:]
            if content_hash(blob).hexdigest().encode() != digest:
                raise ValueError("it does not match its checksum")
            return dict(unpacked(blob)[0])
        except FileNotFoundError as error:
            told = f"client {client} has not kept {path}, which it had after task {tag.task}, round {tag.round}"
            raise UserError(told, remedy) from error
        except (OSError, ValueError) as error:
            raise UserError(f"what client {client} kept in {path} is damaged: {error}", remedy) from error

    def save(self, client: int, tag: Tag, state: State) -> None:
        """Save a client's state after a turn."""
        path = self._path(client, tag)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_leftovers(path)  # of a worker that was killed in the same turn
        blob = packed(Message(state))
        with replacing(path) as temporary:
            temporary.write_bytes(content_hash(blob).hexdigest().encode() + blob)

    def prune(self, client: int, wanted: Collection[Tag | None]) -> None:
        """Delete all of a client's states except these."""
        kept = {self._path(client, tag) for tag in wanted if tag is not None}
        for path in self.folder.glob(f"client-{client}-*"):
            if path not in kept:
                path.unlink()

    def forget(self) -> None:
        """Delete all states, when the run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, client: int, tag: Tag) -> Path:
        return self.folder / f"client-{client}-task-{tag.task}-round-{tag.round}.state"


#: Letters of a file's checksum, which stands before its content.
_DIGEST = len(content_hash(b"").hexdigest())
