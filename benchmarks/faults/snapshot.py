"""The files that runs, tables and caches leave in a folder, without the parts that may depend on disturbances."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fcl_bench.execution.folder import RunFolder
from fcl_bench.files import content_hash, read_json

#: Keys of a record that differ from one run to the next, beside whatever holds seconds.
_TIMED = {"runtime", "environment", "files", "checksum", "cache_hit", "tensors", "row_files"}
#: What a writer puts beside a file until it is whole.
_TEMPORARY = re.compile(r"\..*-[0-9a-f]{32}(\.\w+)?")
#: Folders whose files are for processes, or of one process: locks, reports of a sweep, unfinished work.
_PASSING = {".locks", "sweeps", "checkpoint"}


def snapshot(folder: Path) -> dict[str, object]:
    """The content of every finished file below `folder`, or the hash of it, by relative path.

    Seconds are left out; of logs, locks and lists of modification times there is only the name.
    """
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        parts = set(path.relative_to(folder).parts[:-1])
        if path.is_file() and not parts & _PASSING and not any(part.endswith(".partial") for part in parts):
            # Numbers of states count how many were saved, which depends on the interruptions.
            name = re.sub(r"((?:tensors|rows-\w+))-\d+(?=\.\w+$)", r"\1", name)
            try:
                content = _content(path)
            except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
                content = f"not whole: {error}"
            found[name if name not in found else f"{name} (another)"] = content
    return found


def unfinished(folder: Path) -> list[str]:
    """Names of files that a writer has not put into their places."""
    paths = (path for path in folder.rglob(".*") if path.is_file() and "sweeps" not in path.parts)
    return sorted(path.relative_to(folder).as_posix() for path in paths if _TEMPORARY.fullmatch(path.name))


def finished(content: dict[str, object]) -> dict[str, object]:
    """Return the files of a snapshot that are in their places."""
    return {name: value for name, value in content.items() if not _TEMPORARY.fullmatch(Path(name).name)}


def difference(found: dict[str, object], expected: dict[str, object], whole: bool = True) -> str:
    """One line on what is not as expected; "" if everything is.

    Args:
        whole: whether everything must be there; if not, what is there must be as expected, unless it is a network
            under adaptation, whose state is replaced by the next one.
    """
    if not whole:
        found = {name: value for name, value in found.items() if "/adapted-" not in name}
    wrong = [name for name in found if name in expected and found[name] != expected[name]]
    more = [name for name in found if name not in expected]
    gone = [name for name in expected if name not in found] if whole else []
    told = {"not as undisturbed": wrong, "left behind": more, "missing": gone}
    return "; ".join(f"{what}: {', '.join(names[:4])}" for what, names in told.items() if names)


def false_records(folder: Path) -> list[str]:
    """Run folders below `folder` with a run.json that does not hold: half, damaged, or of files that are not there."""
    found = folder.rglob("runs/*/run.json")
    return [path.parent.name for path in found if RunFolder(path.parent).complete_record() is None]


def _content(path: Path) -> object:
    name = path.name
    if name.endswith((".log", ".lock")) or _TEMPORARY.fullmatch(name):
        return ""
    if name == "run.json":
        return _untimed(read_json(path))
    if name.endswith(".csv"):
        return _without_seconds(path.read_text())
    if name == "state.json":  # of an adapted network, which stays
        return _untimed(json.loads(path.read_text()))
    if name == "config.yaml":
        return re.sub(r"(?m)^(out|  dir): .*$", "", path.read_text())
    if name.startswith("tensors-") or ("-" in name and name.endswith((".safetensors", ".bin"))):
        return _tensors(path)
    return content_hash(path.read_bytes()).hexdigest()


def _untimed(node: Any) -> Any:
    """Without keys of time; of the rest, a report of memory or of the machine is none of a result."""
    if isinstance(node, dict):
        return {
            key: _untimed(value)
            for key, value in node.items()
            if key not in _TIMED and "seconds" not in key and "checksum" not in key
        }
    return [_untimed(value) for value in node] if isinstance(node, list) else node


def _without_seconds(text: str) -> list[list[str]]:
    rows = list(csv.reader(io.StringIO(text)))
    if not rows:
        return []
    kept = [place for place, name in enumerate(rows[0]) if not re.search("seconds|memory", name)]
    return [[row[place] for place in kept if place < len(row)] for row in rows]


def _tensors(path: Path) -> object:
    """The tensors alone: beside them stand the seconds that they took."""
    if path.suffix != ".safetensors":
        return ""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).tolist() for name in file.keys() if "seconds" not in name}  # noqa: SIM118
