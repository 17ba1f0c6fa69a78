"""Data sets: each class is a group choice `data=...` and loads itself into one `Dataset`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fcl_bench.data.images import IMAGE_SUFFIXES, ArrayImages, EncodedImages, FileImages, Images
from fcl_bench.errors import UserError, choices, first_line, require_count
from fcl_bench.files import content_hash

log = logging.getLogger(__name__)

#: Field metadata: the value does not determine the result (a path, a worker count) and stays out of the run id.
NOT_IDENTITY = {"identity": False}


@dataclass(frozen=True)
class Split:
    """One side (train or test) of a data set.

    Attributes:
        labels: (n,) int64, the labels as the source gives them.
        inputs: `Images`, or for ready features an array (n, d).
        fingerprint: hash of the inputs' content.
    """

    labels: np.ndarray
    inputs: Images | np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A data set, ready to be cut into tasks: `train` and `test` hold images, or features."""

    name: str
    train: Split
    test: Split

    @property
    def holds_features(self) -> bool:
        return isinstance(self.train.inputs, np.ndarray)

    @property
    def fingerprint(self) -> str:
        """Hash of everything in it, labels included."""
        digest = content_hash()
        for split in (self.train, self.test):
            digest.update(split.fingerprint.encode())
            digest.update(np.ascontiguousarray(split.labels).data)
        return digest.hexdigest()


class Source(ABC):
    """What `data=...` names: typed knobs and a `load`."""

    name: str

    @abstractmethod
    def load(self) -> Dataset:
        """Read the data set. Raises a `UserError` for whatever the user can mend."""


def image_split(labels: Any, images: Images) -> Split:
    return Split(np.asarray(labels, dtype=np.int64), images, images.fingerprint)


class ImageSource(Source):
    """A source that can leave images out, so that a run is small enough for a CPU: knobs shared by its subclasses.

    Args:
        classes: only the first so many labels, in ascending order, in train and test; None: all.
        per_class: only the first so many training images of each class, in the data set's order; None: all.
        test_per_class: the same for test images.
    """

    classes: int | None
    per_class: int | None
    test_per_class: int | None

    def __post_init__(self) -> None:
        for knob in ("classes", "per_class", "test_per_class"):
            require_count(f"data.{knob}", getattr(self, knob))

    def _first_classes(self, labels: np.ndarray) -> np.ndarray | None:
        """The labels that `classes` keeps of the training labels; None: all. A `UserError` if there are not as many."""
        if self.classes is None:
            return None
        there = np.unique(labels)
        if self.classes > len(there):
            raise UserError(
                f"data.classes={self.classes} is more than the {len(there)} classes of data={self.name}",
                f"1 to {len(there)}",
            )
        return there[: self.classes]

    def _kept(self, side: str, labels: np.ndarray, classes: np.ndarray | None) -> np.ndarray | None:
        """Which samples the knobs keep of one side, ascending, given the labels kept; None: all."""
        most = self.per_class if side == "train" else self.test_per_class
        if classes is None and most is None:
            return None
        keep = np.ones(len(labels), dtype=bool) if classes is None else np.isin(labels, classes)
        if most is not None:
            keep &= _rank_in_class(labels) < most
        return np.flatnonzero(keep)


def _rank_in_class(labels: np.ndarray) -> np.ndarray:
    """How many samples of its class come before each sample (n,)."""
    by_class = np.argsort(labels, kind="stable")
    ordered = labels[by_class]
    rank = np.empty(len(labels), dtype=np.int64)
    rank[by_class] = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    return rank


@dataclass
class Digits(Source):
    """scikit-learn's 1,797 handwritten digits (8 x 8, 17 grey levels, brought to 0..255); no download.

    The source has no test split of its own; every fifth sample of each class, in file order, is a test sample.
    """

    name: str = "digits"

    def load(self) -> Dataset:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        labels = digits.target.astype(np.int64)
        test = _rank_in_class(labels) % 5 == 4
        return Dataset(
            self.name,
            image_split(labels[~test], ArrayImages(pixels[~test])),
            image_split(labels[test], ArrayImages(pixels[test])),
        )


@dataclass
class FeatureFile(Source):
    """Ready features in an .npz file: x_train (n, d), y_train (n,), x_test, y_test; labels non-negative integers."""

    name: str = "features"
    path: str | None = field(default=None, metadata=NOT_IDENTITY)

    def load(self) -> Dataset:
        path = existing_path(self.path, self.name, "an .npz file with x_train, y_train, x_test, y_test")
        arrays = self._read(path)
        splits = [self._split(path, arrays, side) for side in ("train", "test")]
        train_d, test_d = (split.inputs.shape[1] for split in splits)  # type: ignore[union-attr]
        if train_d != test_d:
            raise UserError(
                f"data.path={path}: x_train has {train_d} features and x_test has {test_d}",
                "use one backbone for both",
            )
        return Dataset(self.name, *splits)

    @staticmethod
    def _read(path: Path) -> dict[str, np.ndarray]:
        remedy = "an .npz file with the arrays x_train, y_train, x_test, y_test"
        try:
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise UserError(f"data.path={path} holds a single array", remedy)
            with loaded as file:
                missing = {"x_train", "y_train", "x_test", "y_test"} - set(file.files)
                if missing:
                    raise UserError(f"data.path={path} lacks {', '.join(sorted(missing))}", remedy)
                return {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
        except UserError:
            raise
        except Exception as error:  # whatever NumPy, zipfile, zlib and tokenize raise on foreign bytes
            raise UserError(f"data.path={path} is not a readable .npz file", remedy) from error

    @staticmethod
    def _split(path: Path, arrays: dict[str, np.ndarray], side: str) -> Split:
        x, y = arrays[f"x_{side}"], arrays[f"y_{side}"]
        where = f"data.path={path}:"
        if x.ndim != 2 or x.shape[1] == 0 or x.dtype.kind not in "fiu" or x.dtype.itemsize > 8:
            raise UserError(
                f"{where} x_{side} has shape {x.shape} and type {x.dtype}",
                "numbers of at most 64 bits in an array of shape (n, d), d >= 1",
            )
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise UserError(f"{where} y_{side} has shape {y.shape} and type {y.dtype}", "integers of shape (n,)")
        if len(x) != len(y):
            raise UserError(
                f"{where} x_{side} has {len(x)} rows and y_{side} has {len(y)} labels",
                "one label for each row",
            )
        if len(y) and int(y.min()) < 0:
            raise UserError(f"{where} y_{side} holds the label {y.min()}", "labels are non-negative integers")
        if len(y) and int(y.max()) > np.iinfo(np.int64).max:
            raise UserError(f"{where} y_{side} holds the label {y.max()}", "labels below 2^63")
        if x.dtype.kind == "f":
            x = x.astype(x.dtype.newbyteorder("="), copy=False)
        else:  # exactly, up to 2^53; torch has few operations on unsigned integers
            x = x.astype(np.float32 if x.dtype.itemsize <= 2 else np.float64)
        finite = np.isfinite(x).all(axis=1)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0])
            raise UserError(
                f"{where} x_{side} holds NaN or infinity in {int((~finite).sum())} rows, the first is row {row}",
                "every feature is a finite number",
            )
        digest = content_hash()
        digest.update(f"{x.dtype} {x.shape}".encode())
        digest.update(np.ascontiguousarray(x).data)
        return Split(y.astype(np.int64), x, digest.hexdigest())


@dataclass
class HubImages(ImageSource):
    """An image data set of the Hugging Face hub at a pinned revision, or a local folder in the same parquet layout.

    Args:
        name: what tables call it.
        repo: hub name ("uoft-cs/cifar100").
        revision: commit of the hub repository.
        image_column, label_column: the columns to read.
        path: a local folder to read instead (data/train-*.parquet, data/test-*.parquet).
        classes, per_class, test_per_class: see `ImageSource`.
    """

    name: str
    repo: str
    revision: str
    image_column: str
    label_column: str
    path: str | None = field(default=None, metadata=NOT_IDENTITY)
    classes: int | None = None
    per_class: int | None = None
    test_per_class: int | None = None

    def load(self) -> Dataset:
        tables = {side: self._labelled(side) for side in ("train", "test")}
        classes = self._first_classes(tables["train"][1])
        return Dataset(self.name, *(self._split(side, *tables[side], classes) for side in tables))

    def _split(self, side: str, table: Any, labels: np.ndarray, classes: np.ndarray | None) -> Split:
        rows = self._kept(side, labels, classes)
        images = EncodedImages(table, self.image_column, f"{self._key}: {side}", rows)
        return image_split(labels if rows is None else labels[rows], images)

    @property
    def _key(self) -> str:
        return f"data.path={self.path}" if self.path else f"data={self.name}"

    def _labelled(self, side: str) -> tuple[Any, np.ndarray]:
        """One side's table, its images not decoded, and its labels (n,)."""
        import datasets

        table, key = self._table(side), self._key
        for column in (self.image_column, self.label_column):
            if column not in table.column_names:
                raise UserError(f"{key}: no column {column} in {side}", choices(table.column_names, column))
        table = table.cast_column(self.image_column, datasets.Image(decode=False))
        labels = np.asarray(table.with_format("numpy")[self.label_column][:])
        if labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
            raise UserError(
                f"{key}: column {self.label_column} of {side} is not a class label", "non-negative integers"
            )
        return table, labels

    def _table(self, side: str) -> Any:
        import datasets

        if self.path is not None:
            folder = existing_path(self.path, self.name, "a folder with data/train-*.parquet and data/test-*.parquet")
            datasets.disable_progress_bars()  # a local folder is read in a second or two
            try:
                return datasets.load_dataset(str(folder), split=side)
            except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
                raise UserError(
                    f"data.path={folder} has no readable {side} split: {first_line(error)}",
                    f"the parquet layout of {self.repo}: data/train-*.parquet and data/test-*.parquet",
                ) from error
        log.info("data %s, %s: from the hub, or its cache on this machine", self.name, side)
        try:
            return datasets.load_dataset(self.repo, revision=self.revision, split=side)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise UserError(
                f"data={self.name}: {self.repo} could not be fetched from the hub: {first_line(error)}",
                f"data.path=FOLDER with that repository's parquet files, revision {self.revision[:8]}",
            ) from error


@dataclass
class ImageFolder(ImageSource):
    """Images in train/<class>/* and test/<class>/*; classes are numbered in the alphabetical order of their names.

    Args:
        name: what tables call it.
        path: the folder.
        classes, per_class, test_per_class: see `ImageSource`.
    """

    name: str = "imagefolder"
    path: str | None = field(default=None, metadata=NOT_IDENTITY)
    classes: int | None = None
    per_class: int | None = None
    test_per_class: int | None = None

    def load(self) -> Dataset:
        root = existing_path(self.path, self.name, "a folder with train/<class>/* and test/<class>/*")
        names = {side: self._classes(root / side) for side in ("train", "test")}
        unseen = set(names["test"]) - set(names["train"])
        if unseen:
            raise UserError(
                f"data.path={root}: class {min(unseen)} is in test/ but not in train/",
                "the same classes in both",
            )
        kept = self._first_classes(np.arange(len(names["train"])))
        numbers = {name: number for number, name in enumerate(names["train"]) if kept is None or number in kept}
        return Dataset(self.name, *(self._split(root, side, numbers) for side in ("train", "test")))

    @staticmethod
    def _classes(folder: Path) -> list[str]:
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
        if not classes:
            raise UserError(
                f"data.path={folder.parent} has no {folder.name}/<class>/ folders",
                "train/<class>/* and test/<class>/*",
            )
        return classes

    def _split(self, root: Path, side: str, numbers: dict[str, int]) -> Split:
        folder = root / side
        files, labels = self._labelled(folder, numbers)
        chosen = self._kept(side, labels, None)
        if chosen is not None:
            files, labels = [files[index] for index in chosen], labels[chosen]
        return image_split(labels, FileImages(folder, files))

    @staticmethod
    def _labelled(folder: Path, numbers: dict[str, int]) -> tuple[list[Path], np.ndarray]:
        """The files of the classes in `numbers` and their labels (n,), class by class, then in order of their paths."""
        files: list[Path] = []
        labels: list[int] = []
        empty: list[str] = []
        for name, number in numbers.items():
            found = sorted(file for file in (folder / name).rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
            files += found
            labels += [number] * len(found)
            empty += [name] if not found else []
        if not files:
            raise UserError(
                f"data.path={folder.parent}: no images under {folder.name}/",
                f"files ending in {', '.join(sorted(IMAGE_SUFFIXES))}",
            )
        if empty:
            raise UserError(
                f"data.path={folder.parent}: no images in {folder.name}/{empty[0]}/", "at least one a class"
            )
        return files, np.asarray(labels, dtype=np.int64)


def existing_path(path: str | None, data: str, wanted: str) -> Path:
    """`path` expanded, if it exists; otherwise a UserError that says what `data.path` should be."""
    if path is None:
        raise UserError(f"data={data} needs data.path", f"data.path={wanted}")
    expanded = Path(path).expanduser()
    if not expanded.exists():
        raise UserError(f"data.path={path} does not exist", wanted)
    return expanded
