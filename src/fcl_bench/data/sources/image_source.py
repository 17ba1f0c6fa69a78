"""Images with labels: one side of such a data set, sources that can leave some out, class folders; samples alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from fcl_bench.config import knob
from fcl_bench.data.images.stored import IMAGE_SUFFIXES, ArrayImages, EncodedImages, FileImages, Images
from fcl_bench.data.sources.array_files import native_floats
from fcl_bench.data.sources.base import Dataset, Source, Split, existing_path, image_split, rank_in_group
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Side(ABC):
    """Samples of one side (train or test), before their images are opened.

    Attributes:
        domains: (n,) int64, each sample's domain; None where there are none.
        rows: (n,) which of the side's images these are, ascending; None: all of them.
    """

    labels: np.ndarray
    domains: np.ndarray | None = field(default=None, kw_only=True)
    rows: np.ndarray | None = field(default=None, kw_only=True)

    def taken(self, indices: np.ndarray) -> Self:
        """The samples `indices` (ascending) of these."""
        rows = indices if self.rows is None else self.rows[indices]
        domains = None if self.domains is None else self.domains[indices]
        return replace(self, labels=self.labels[indices], domains=domains, rows=rows)

    @abstractmethod
    def images(self, name: str) -> Images:
        """The images; messages call them `name`."""


@dataclass(frozen=True)
class TableSide(Side):
    """Images in the column of a table: a `datasets.Dataset` that does not decode it."""

    table: Any
    column: str

    def images(self, name: str) -> Images:
        return EncodedImages(self.table, self.column, name, self.rows)


@dataclass(frozen=True)
class FileSide(Side):
    """Images in files at or below the folder `root`."""

    files: Sequence[Path]
    root: Path

    def images(self, name: str) -> Images:
        return FileImages(self.root, self.files if self.rows is None else [self.files[row] for row in self.rows])


@dataclass(kw_only=True)
class ImageSource(Source):
    """A source that can leave images out, so that a run is small enough for a CPU."""

    path: str | None = knob(None, identity=False)
    classes: int | None = knob(None, least=1)
    skip_classes: int = knob(0, least=0)
    per_class: int | None = knob(None, least=1)
    test_per_class: int | None = knob(None, least=1)

    def _chosen_classes(self, labels: np.ndarray) -> np.ndarray | None:
        """The training labels that `skip_classes` and `classes` leave, ascending; None: all.

        Raises:
            UserError: the data set has fewer labels than that.
        """
        if self.classes is None and not self.skip_classes:
            return None
        there = np.unique(labels)
        left = there[self.skip_classes :]
        if not len(left):
            raise UserError(
                f"data.skip_classes={self.skip_classes} leaves none of the {len(there)} classes of data={self.name}",
                f"0 to {len(there) - 1}",
            )
        if self.classes is not None and self.classes > len(left):
            after = f" after data.skip_classes={self.skip_classes}" if self.skip_classes else ""
            raise UserError(
                f"data.classes={self.classes} is more than the {len(left)} classes of data={self.name}{after}",
                f"1 to {len(left)}",
            )
        return left[: self.classes]

    def _assembled(self, sides: Mapping[str, Side], origin: str = "", domain_names: tuple[str, ...] = ()) -> Dataset:
        """The data set with the samples of the sides "train" and "test" that the knobs retain."""
        classes = self._chosen_classes(sides["train"].labels)
        train = self._split("train", sides["train"], classes, self.per_class)
        test = self._split("test", sides["test"], classes, self.test_per_class)
        return Dataset(self.name, train, test, domain_names=domain_names, origin=origin)

    def _split(self, side: str, part: Side, classes: np.ndarray | None, most: int | None) -> Split:
        """The samples of these classes (None: all), at most so many of each class, with domains in each of them."""
        labels, domains = part.labels, part.domains
        retained = np.ones(len(labels), dtype=bool) if classes is None else np.isin(labels, classes)
        if most is not None:
            groups = labels if domains is None or not len(domains) else labels * (domains.max() + 1) + domains
            retained &= rank_in_group(groups) < most
        if not retained.all():
            part = part.taken(np.flatnonzero(retained))
        return image_split(part.labels, part.images(f"{self._key}: {side}"), part.domains)


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
    """The files of the classes in `numbers`, class by class, then in order of their paths."""
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


_FORMS = "uint8 images (n, h, w) or (n, h, w, 3), PIL images, paths of image files, or features (n, d)"


class OpenImages(Images):
    """Images that are already open."""

    def __init__(self, images: Sequence[Image.Image]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Image.Image:
        return self._images[index]


def samples_of(inputs: Any, texts: bool = False) -> Split:
    """Images or features in whatever form they are, or texts where strings are `texts`; the labels are all -1.

    Raises:
        UserError: they are none of these.
    """
    if isinstance(inputs, Split):
        return inputs
    texts = texts and all(isinstance(entry, str) for entry in inputs)
    found = np.array(inputs, dtype=object) if texts else _inputs(inputs)
    return Split(np.full(len(found), -1, dtype=np.int64), found, "")


def _inputs(inputs: Any) -> Images | np.ndarray:
    if isinstance(inputs, Images):
        return inputs
    if isinstance(inputs, list | tuple) and inputs:
        if all(isinstance(entry, Image.Image) for entry in inputs):
            return OpenImages(inputs)
        if all(isinstance(entry, str | Path) for entry in inputs):
            return FileImages(Path("/"), [Path(entry).expanduser().absolute() for entry in inputs])
    array = inputs.detach().cpu().numpy() if hasattr(inputs, "detach") else np.asarray(inputs)
    if array.ndim == 2 and array.dtype.kind in "fiu":
        return native_floats(array)
    if array.dtype == np.uint8 and (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3)):
        return ArrayImages(array)
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[1] == 3:
        return ArrayImages(array.transpose(0, 2, 3, 1))
    raise UserError(f"inputs of shape {array.shape} and type {array.dtype} are neither images nor features", _FORMS)


class ChosenImages(Images):
    """The images `rows` (n,) of others, decoded on access; `rows_of` gives their split a fingerprint."""

    def __init__(self, images: Images, rows: np.ndarray) -> None:
        self._images, self._rows = images, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Image.Image:
        return self._images[int(self._rows[index])]

    def decoded(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        return self._images.decoded(self._rows[list(indices)].tolist())

    def describe(self, index: int) -> str:
        return self._images.describe(int(self._rows[index]))


def rows_of(split: Split, rows: np.ndarray) -> Split:
    """The samples `rows` (m,) of a split, in this order; no other sample's values are read."""
    if isinstance(split.inputs, np.ndarray):
        inputs: Images | np.ndarray = split.inputs[rows]
    elif isinstance(split.inputs, ArrayImages):
        inputs = ArrayImages(split.inputs.pixels[rows])
    else:
        inputs = ChosenImages(split.inputs, rows)
    digest = content_hash(split.fingerprint.encode())
    digest.update(np.ascontiguousarray(rows).data)
    domains = None if split.domains is None else split.domains[rows]
    return replace(
        split, labels=split.labels[rows], inputs=inputs, fingerprint=digest.hexdigest(), domains=domains, clients=None
    )
