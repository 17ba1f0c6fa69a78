"""Checks whether tables that were written earlier still fit the runs, the options and the code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fcl_bench.files import json_hash, locked, remove_leftovers, replacing

_SOURCES = (".py", ".csv", ".yaml", ".html", ".css", ".js")


class Made:
    """The record of what `fcl-tables` made with some options; it is kept beside the files.

    Runs and code are read once, when this object is made: runs that end while the files are written are not in them.

    Args:
        out: the folder that holds runs/ and tables/.
        options: the command's options; those that only say when to work do not count.

    Attributes:
        runs: their number.
        files: the files that were made, if `is_current`.
    """

    def __init__(self, out: Path, options: Mapping[str, object]) -> None:
        counts = {key: value for key, value in options.items() if key != "if_changed"}
        self._note = out / "tables" / f".made-{json_hash(counts)}.json"
        runs = sorted(out.glob("runs/*/run.json"))
        self.runs, self.files = len(runs), list[str]()
        # The time of a sweep's reports decides which sweep is the latest, and tells of more of them.
        self._sources = _stamps([*runs, *out.glob("sweeps/*/jobs"), *_code(options.get("reference") is not None)])

    def is_current(self) -> bool:
        """Whether nothing has changed since `note`."""
        try:
            noted = json.loads(self._note.read_text())
            self.files = list(noted["files"])
            return bool(
                noted == {"sources": self._sources, "files": self.files, "made": _stamps(map(Path, self.files))}
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def note(self, files: list[Path]) -> None:
        """Remember that `files` were written from the runs as they were when this was made."""
        with locked(self._note.parent / ".lock", f"writing to {self._note.parent}"):
            remove_leftovers(self._note)
            with replacing(self._note) as temporary:
                temporary.write_text(json.dumps(self._state(files)))

    def _state(self, files: Iterable[Path]) -> dict[str, object]:
        files = list(files)
        return {"sources": self._sources, "files": list(map(str, files)), "made": _stamps(files)}


def _code(reference: bool) -> Iterable[Path]:
    """Return the files on which tables depend: the package, its configurations and, on request, reference results."""
    # Imported only here, since the help of the command needs nothing of it, and reference results import torch.
    from fcl_bench.composition import config_dir

    folders = {Path(__file__).resolve().parents[1], config_dir()}
    if reference:
        from fcl_bench.results.reference import folder

        folders.add(folder())
    return (file for place in folders for file in place.rglob("*") if file.suffix in _SOURCES)


def _stamps(files: Iterable[Path]) -> str:
    """Return one text for the sizes and times of all the files."""
    found = {}
    for file in files:
        with suppress(OSError):  # it is not there
            found[str(file)] = [file.stat().st_size, file.stat().st_mtime_ns]
    return json_hash(found)
