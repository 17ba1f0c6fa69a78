"""Images in one folder per class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.images.stored import IMAGE_SUFFIXES
from fcl_bench.data.sources.base import Dataset, existing_path
from fcl_bench.data.sources.image_source import FileSide, ImageSource
from fcl_bench.errors import UserError


@dataclass
class ImageFolder(ImageSource):
    """Images in train/<class>/* and test/<class>/*; classes are numbered in the alphabetical order of their names.

    Classes that only test/ has are numbered after the others; a class that only train/ has is learnt and not tested.
    """

    name: str = knob("imagefolder", filled=True, words="a name for tables")

    def load(self) -> Dataset:
        root = existing_path(self.path, self.name, "a folder with train/<class>/* and test/<class>/*")
        names = {side: self._classes(root / side) for side in ("train", "test")}
        # Classes without training samples come last; a stream leaves them out and says so.
        unseen = [name for name in names["test"] if name not in names["train"]]
        numbers = {name: number for number, name in enumerate([*names["train"], *unseen])}
        known = {side: {name: number for name, number in numbers.items() if name in names[side]} for side in names}
        found = self._assembled({side: labelled_files(root / side, known[side], root) for side in known})
        return replace(found, class_names=tuple(numbers))

    @staticmethod
    def _classes(folder: Path) -> list[str]:
        classes = class_names(folder)
        if not classes:
            raise UserError(
                f"data.path={folder.parent} has no {folder.name}/<class>/ folders",
                "train/<class>/* and test/<class>/*",
            )
        return classes


def class_names(folder: Path) -> list[str]:
    """The folders in `folder`, in alphabetical order; empty if there is no such folder."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def labelled_files(folder: Path, numbers: dict[str, int], path: Path) -> FileSide:
    """The files of the classes in `numbers`, class by class, then in order of their paths.

    Args:
        folder: holds one folder per class, with images at any depth below it.
        numbers: each class's name and label.
        path: the path that the user gave, for messages.
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
        raise UserError(f"data.path={path}: no images in {within}{empty[0]}/", "at least one per class")
    return FileSide(np.asarray(labels, dtype=np.int64), files, folder)
