"""Packages that `fcl-bench new` writes, found as if pip had installed them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fcl_bench.cli.knobs import search_also
from fcl_bench.cli.new import package
from fcl_bench.composition import installed


def write_package(folder: Path, kind: str, name: str) -> None:
    for path, content in package(kind, name).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


@contextmanager
def installed_package(folder: Path, name: str) -> Iterator[None]:
    """In the block, the package in `folder` is installed: it can be imported, and its entry point is known."""
    about = folder / f"{name}-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    project = (folder / "pyproject.toml").read_text()
    entries = project.split('[project.entry-points."fcl_bench.choices"]\n')[1].split("\n\n")[0]
    (about / "entry_points.txt").write_text(f"[fcl_bench.choices]\n{entries}\n".replace('"', ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        _look_again()
        yield
    _look_again()


def _look_again() -> None:
    installed.cache_clear()
    search_also([], [])
