"""Finds the folder of a run by its path, its name or its id."""

from __future__ import annotations

from pathlib import Path

from fcl_bench.errors import UserError
from fcl_bench.files import user_path

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
