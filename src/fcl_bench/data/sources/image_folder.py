"""Images in one folder a class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fcl_bench.data.images.stored import IMAGE_SUFFIXES, FileImages
from fcl_bench.data.sources.base import Dataset, Split, existing_path
from fcl_bench.data.sources.image_source import ImageSource, image_split
from fcl_bench.errors import UserError


@dataclass
class ImageFolder(ImageSource):
    """Images in train/<class>/* and test/<class>/*; classes are numbered in the alphabetical order of their names.

    Classes that only test/ has come behind the others; a class that only train/ has is learnt and not tested.

    Args:
        name: what tables call it.
        path: the folder.
        classes, per_class, test_per_class: see `ImageSource`.
    """

    name: str = "imagefolder"

    def load(self) -> Dataset:
        root = existing_path(self.path, self.name, "a folder with train/<class>/* and test/<class>/*")
        names = {side: self._classes(root / side) for side in ("train", "test")}
        kept = self._first_classes(np.arange(len(names["train"])))
        numbers = {name: number for number, name in enumerate(names["train"]) if kept is None or number in kept}
        # Classes without training samples come behind, where a stream leaves them out and says so.
        unseen = [name for name in names["test"] if name not in names["train"]] if kept is None else []
        behind = {name: len(names["train"]) + place for place, name in enumerate(unseen)}
        known = {side: {name: number for name, number in numbers.items() if name in names[side]} for side in names}
        train, test = self._split(root, "train", known["train"]), self._split(root, "test", {**known["test"], **behind})
        return Dataset(self.name, train, test)

    @staticmethod
    def _classes(folder: Path) -> list[str]:
        classes = class_names(folder)
        if not classes:
            raise UserError(
                f"data.path={folder.parent} has no {folder.name}/<class>/ folders",
                "train/<class>/* and test/<class>/*",
            )
        return classes

    def _split(self, root: Path, side: str, numbers: dict[str, int]) -> Split:
        folder = root / side
        files, labels = labelled_files(folder, numbers, root)
        chosen = self._kept(side, labels, None)
        if chosen is not None:
            files, labels = [files[index] for index in chosen], labels[chosen]
        return image_split(labels, FileImages(folder, files))


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
