"""Results of the benchmarks in one form: a JSON file of rows, and beside it the same rows as a table in Markdown.

The JSON has `command`, `machine`, and `rows`: each a flat object of names and values. A list is one value measured
several times, of which tables show the median. The suite's own files are pytest-benchmark's (suite/results.py).
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_DIGITS = 3


def machine() -> str:
    """One line: processor, cores, threads asked for, Python."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = found[0] if found else model
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    return f"{model}, {os.cpu_count()} cores, OMP_NUM_THREADS {threads}, Python {platform.python_version()}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 0) -> str:
    """Rows as a Markdown table; its first columns, `words` of them, are set to the left, the others to the right."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of a result file as a Markdown table; empty cells where a row has no such value."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    words = next((place for place, key in enumerate(header) if not isinstance(rows[0].get(key), str)), len(header))
    return table(header, [[_shown(row.get(key)) for key in header] for row in rows], words)


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and not isinstance(value[0], str):
        value = statistics.median(value)
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}" if abs(value) < 10**_DIGITS else f"{value:.0f}"
    return "" if value is None else str(value)


def write(file: Path | None, rows: Sequence[Mapping[str, Any]], text: str = "", **about: Any) -> None:
    """Write a result file (`.json`) and its table (`.md`); nothing if `file` is None.

    Args:
        file: of either suffix.
        rows: nested objects become names with dots.
        text: Markdown in place of the table of the rows.
        about: what else belongs to all rows.
    """
    if file is None:
        return
    flat = [dict(_flat(row)) for row in rows]
    # A path of this machine says nothing to others; its name does.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = f"python -m benchmarks {Path(sys.argv[0]).stem} {shlex.join(words)}".strip()
    content = {"command": command, "machine": machine(), **about, "rows": flat}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    file.with_suffix(".md").write_text(f"{machine()}\n\n{text or table_of(flat)}\n")


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load(file: Path) -> dict[str, Any]:
    """The content of a result file. Raises ValueError for a file that is none."""
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or not content["rows"]:
        raise ValueError(f"{file} has no rows")
    return content
