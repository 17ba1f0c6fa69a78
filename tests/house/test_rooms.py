"""Every room stays within its budget of lines, which docs/explanation/architecture.md states."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "src" / "fcl_bench"
#: A row of the page's table: rooms in backticks, what they hold, the most lines today, the aim.
_ROW = re.compile(r"^\| ((?:`[\w./]+`(?:, )?)+) \|.*\| ([\d,]+) \| [\d,]+ \|$", re.MULTILINE)
_TOTAL = re.compile(r"^\| (the core|all of it)[^|]*\|.*\| ([\d,]+) \| [\d,]+ \|$", re.MULTILINE)
#: What stands on top of the core: who knows the core need not know these.
ON_TOP = ("methods", "papers", "flower", "leaderboard")


def budgets() -> dict[tuple[str, ...], int]:
    """Rooms -> the most lines that they may have together."""
    page = (REPOSITORY / "docs" / "explanation" / "architecture.md").read_text()
    rows = {tuple(re.findall(r"`([\w./]+)`", rooms)): int(most.replace(",", "")) for rooms, most in _ROW.findall(page)}
    assert len(rows) > 8, "docs/explanation/architecture.md has no table of rooms"
    return rows


def lines_of(room: str) -> int:
    """Lines of a module or of all modules of a package, blank ones included."""
    path = PACKAGE / room
    files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else [*path.rglob("*.py")]
    assert files, f"there is no room {room}"
    return sum(len(file.read_text().splitlines()) for file in files)


def test_each_room_is_within_its_budget() -> None:
    over = {
        ", ".join(rooms): f"{found} lines, at most {most}"
        for rooms, most in budgets().items()
        if (found := sum(map(lines_of, rooms))) > most
    }
    assert not over


def test_each_module_is_in_one_room() -> None:
    named = [room for rooms in budgets() for room in rooms]
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert len(named) == len(set(named))
    assert set(named) == there - {"__init__", "__main__"}


def test_the_core_and_the_whole_are_within_theirs() -> None:
    page = (REPOSITORY / "docs" / "explanation" / "architecture.md").read_text()
    most = {what: int(number.replace(",", "")) for what, number in _TOTAL.findall(page)}
    sizes = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    core = sum(size for path, size in sizes.items() if path.relative_to(PACKAGE).parts[0] not in ON_TOP)
    assert core <= most["the core"]
    assert sum(sizes.values()) <= most["all of it"]


def test_no_file_is_long() -> None:
    """One idea per file; 400 lines are enough for it."""
    files = [*PACKAGE.rglob("*.py"), *Path(REPOSITORY / "tests").rglob("*.py")]
    assert not {str(file): size for file in files if (size := len(file.read_text().splitlines())) > 400}
