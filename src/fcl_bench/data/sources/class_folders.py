"""Images in one folder a class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fcl_bench.data.images.stored import IMAGE_SUFFIXES
from fcl_bench.errors import UserError


def class_names(folder: Path) -> list[str]:
    """The folders in `folder`, in alphabetical order; empty if there is no such folder."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def labelled_files(folder: Path, numbers: dict[str, int], path: Path) -> tuple[list[Path], np.ndarray]:
    """The files of the classes in `numbers` and their labels (n,), class by class, then in order of their paths.

    Args:
        folder: holds a folder a class, with images at any depth below it.
        numbers: each class's name and label.
        path: what the user named, for messages.
    """
    files: list[Path] = []
    labels: list[int] = []
    empty: list[str] = []
    for name, number in numbers.items():
        found = sorted(file for file in (folder / name).rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        files += found
        labels += [number] * len(found)
        empty += [name] if not found else []
    within = f"{folder.relative_to(path).as_posix()}/" if folder != path else ""
    if not files:
        raise UserError(
            f"data.path={path}: no images under {within or 'it'}",
            f"files ending in {', '.join(sorted(IMAGE_SUFFIXES))}",
        )
    if empty:
        raise UserError(f"data.path={path}: no images in {within}{empty[0]}/", "at least one a class")
    return files, np.asarray(labels, dtype=np.int64)
