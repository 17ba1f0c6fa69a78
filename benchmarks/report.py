"""The reports of scaling.py, tree.py and first_hour.py: the machine, tables in Markdown, and both as files."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def machine() -> str:
    """One line: processor, cores, threads asked for, Python."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = found[0] if found else model
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    return f"{model}, {os.cpu_count()} cores, OMP_NUM_THREADS {threads}, Python {platform.python_version()}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 0) -> str:
    """Rows as a Markdown table; its first columns, `words` of them, are set to the left, the others to the right."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def write(path: Path | None, text: str, runs: list[dict[str, Any]]) -> None:
    """Write machine and text to `path`, and machine and measurements beside it as .json; nothing if it is None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{machine()}\n\n{text}\n")
    path.with_suffix(".json").write_text(json.dumps({"machine": machine(), "runs": runs}, indent=2))
