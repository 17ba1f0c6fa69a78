"""Checks whether tables that were written earlier still fit the runs, the options and the code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcl_bench.files import content_hash, json_hash, locked, remove_leftovers, replacing

_SOURCES = (".py", ".csv", ".yaml", ".html", ".css", ".js")


class Made:
    """The record of what `fcl-tables` made with some options; it is kept beside the files.

    Runs and code are read once, when this object is made: runs that end while the files are written are not in them.

    Args:
        out: the folder that holds runs/ and tables/.
        options: the command's options; those that only say when to work do not count.

    Attributes:
        files, runs: the number of each, known once `is_current` has returned True.
    """

    def __init__(self, out: Path, options: Mapping[str, object]) -> None:
        self._out = out
        counts = {key: value for key, value in options.items() if key != "if_changed"}
        digest = content_hash()
        digest.update(json.dumps(counts, sort_keys=True, default=str).encode())
        self._note = out / "tables" / f".made-{digest.hexdigest()}.json"
        self._sources = {
            "runs": {file.parent.name: _stamp(file) for file in sorted(out.glob("runs/*/run.json"))},
            # The time of a sweep's reports, which decides which sweep is the latest, and tells of more of them.
            "sweeps": {folder.name: _stamp(folder / "jobs") for folder in sorted(out.glob("sweeps/*"))},
            "code": json_hash({str(file): _stamp(file) for file in _code(options.get("reference"))}),
        }

    def is_current(self) -> bool:
        """Whether nothing has changed since `note`."""
        try:
            noted = json.loads(self._note.read_text())
            now = self._state(list(noted["files"]))
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self.files, self.runs = len(now["files"]), len(now["runs"])
        return noted == now

    def note(self, files: list[Path]) -> None:
        """Remember that `files` were written from the runs as they were when this was made."""
        state = self._state([str(file.relative_to(self._out)) for file in files])
        with locked(self._note.parent / ".lock", f"writing to {self._note.parent}"):
            remove_leftovers(self._note)
            with replacing(self._note) as temporary:
                temporary.write_text(json.dumps(state))

    def _state(self, files: list[str]) -> dict[str, Any]:
        return {"files": {name: _stamp(self._out / name) for name in files}, **self._sources}


def _code(reference: object) -> list[Path]:
    """Return the files on which tables depend: the package, the configurations that it composes, reference results.

    Args:
        reference: the option of this name; None: none are shown.
    """
    # Imported only here, since the help of the command needs nothing of it, and reference results import torch.
    from fcl_bench.composition import config_dir

    folders = {Path(__file__).resolve().parents[1], config_dir()}
    if reference is not None:
        from fcl_bench.results.reference import folder

        folders.add(folder())
    return sorted({file for place in folders for file in place.rglob("*") if file.suffix in _SOURCES})


def _stamp(file: Path) -> list[int] | None:
    """Return the file's size and time; None for a file that is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]
