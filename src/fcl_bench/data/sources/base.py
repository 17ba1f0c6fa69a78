"""Data sets: each class is a group choice `data=...` and loads itself into one `Dataset`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fcl_bench.data.images.stored import ArrayImages, EncodedImages, FileImages, Images
from fcl_bench.data.sources.about import About
from fcl_bench.data.sources.class_folders import class_names, labelled_files
from fcl_bench.data.sources.hub import Repository, Snapshot, fetch, incomplete, split_files
from fcl_bench.data.sources.hub_tables import TableSide, class_labels, read_table, undecoded
from fcl_bench.errors import UserError, require_count
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
        domains: (n,) int64, each sample's domain; None where the source has none.
    """

    labels: np.ndarray
    inputs: Images | np.ndarray
    fingerprint: str
    domains: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A data set, ready to be cut into tasks: `train` and `test` hold images, or features.

    Attributes:
        domain_names: of the numbers in `domains`, in order; empty where the source has none.
        origin: which files these are ("uoft-cs/cifar100 at aadb3af..."); empty where the name says it all.
    """

    name: str
    train: Split
    test: Split
    domain_names: tuple[str, ...] = field(default=(), kw_only=True)
    origin: str = field(default="", kw_only=True)

    @property
    def holds_features(self) -> bool:
        return isinstance(self.train.inputs, np.ndarray)

    @property
    def fingerprint(self) -> str:
        """Hash of everything in it, labels and domains included."""
        digest = content_hash()
        for split in (self.train, self.test):
            digest.update(split.fingerprint.encode())
            digest.update(np.ascontiguousarray(split.labels).data)
            if split.domains is not None:
                digest.update(b"domains")
                digest.update(np.ascontiguousarray(split.domains).data)
        return digest.hexdigest()


class Source(ABC):
    """What `data=...` names: typed knobs and a `load`."""

    name: str

    @abstractmethod
    def load(self) -> Dataset:
        """Read the data set. Raises a `UserError` for whatever the user can mend."""

    def facts(self) -> About:
        """What is known about it beforehand."""
        return About()

    def repositories(self) -> list[Repository]:
        """What it needs of the hub; nothing where it reads local files."""
        return []

    def prepare(self) -> None:
        """Do what can be done once, ahead of all runs, when the files of `repositories` are on this machine."""
        return

    def whole(self) -> bool:
        """Whether no knob leaves images out that `facts` counts."""
        return True


def image_split(labels: Any, images: Images, domains: np.ndarray | None = None) -> Split:
    return Split(np.asarray(labels, dtype=np.int64), images, images.fingerprint, domains)


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

    def whole(self) -> bool:
        return self.classes is None and self.per_class is None and self.test_per_class is None

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

    def _kept(
        self, side: str, labels: np.ndarray, classes: np.ndarray | None, domains: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Which samples the knobs keep of one side, ascending, given the labels kept; None: all.

        Where there are domains, so many of each class in each domain.
        """
        most = self.per_class if side == "train" else self.test_per_class
        if classes is None and most is None:
            return None
        keep = np.ones(len(labels), dtype=bool) if classes is None else np.isin(labels, classes)
        if most is not None:
            groups = labels if domains is None or not len(domains) else labels * (domains.max() + 1) + domains
            keep &= _rank_in_class(groups) < most
        return np.flatnonzero(keep)

    def _assembled(self, sides: dict[str, TableSide], origin: str, domain_names: tuple[str, ...] = ()) -> Dataset:
        """What the knobs keep of the sides "train" and "test"."""
        classes = self._first_classes(sides["train"].labels)
        train, test = (self._side(side, sides[side], classes) for side in ("train", "test"))
        return Dataset(self.name, train, test, domain_names=domain_names, origin=origin)

    def _side(self, side: str, whole: TableSide, classes: np.ndarray | None) -> Split:
        part = whole.taken(self._kept(side, whole.labels, classes, whole.domains))
        images = EncodedImages(part.table, self._image_column, f"{self._key}: {side}", part.rows)
        return image_split(part.labels, images, part.domains)

    @property
    def _image_column(self) -> str:
        return str(getattr(self, "image_column", "image"))

    @property
    def _key(self) -> str:
        """What to call the data set in messages: as the user typed it."""
        path = getattr(self, "path", None)
        return f"data.path={path}" if path else f"data={self.name}"


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

    def facts(self) -> About:
        return About(10, 1442, 355, licence="comes with scikit-learn (UCI, CC BY 4.0)")

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
        # Here, since listing data sets needs no torch.
        import torch

        from fcl_bench.data.images.finite import rows_not_finite

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
        x = np.ascontiguousarray(x)
        bad = rows_not_finite(torch.from_numpy(x))
        if len(bad):
            raise UserError(
                f"{where} x_{side} holds NaN or infinity in {len(bad)} rows, the first is row {int(bad[0])}",
                "every feature is a finite number",
            )
        digest = content_hash()
        digest.update(f"{x.dtype} {x.shape}".encode())
        digest.update(x.data)
        return Split(y.astype(np.int64), x, digest.hexdigest())


@dataclass
class HubImages(ImageSource):
    """An image data set of the Hugging Face hub at a pinned revision, or a local folder in the same layout.

    Args:
        name: what tables call it.
        repo: hub name ("uoft-cs/cifar100").
        revision: commit of the hub repository; None: whatever its main branch holds, which the log names.
        image_column, label_column: the columns to read.
        path: a local folder to read instead: the repository's parquet files at any depth (train-*.parquet,
            test-*.parquet), or images in train/<class>/* and test/<class>/*.
        classes, per_class, test_per_class: see `ImageSource`.
        train_split, test_split: what the repository calls the two sides. No part of a run's identity: the hash of the
            images' content is.
        about: what is known beforehand.
    """

    name: str
    repo: str
    revision: str | None
    image_column: str
    label_column: str
    path: str | None = field(default=None, metadata=NOT_IDENTITY)
    classes: int | None = None
    per_class: int | None = None
    test_per_class: int | None = None
    train_split: str = field(default="train", metadata=NOT_IDENTITY)
    test_split: str = field(default="test", metadata=NOT_IDENTITY)
    about: About = field(default_factory=About, metadata=NOT_IDENTITY)

    def load(self) -> Dataset:
        if (folders := self._class_folders()) is not None:
            return folders.load()
        return self._assembled(self.sides(), self.origin())

    def facts(self) -> About:
        return self.about

    def repositories(self) -> list[Repository]:
        if self.path is not None:
            return []
        splits = tuple(dict.fromkeys((self.train_split, self.test_split)))
        return [Repository(self.name, self.repo, self.revision, splits)]

    def sides(self) -> dict[str, TableSide]:
        """All of "train" and "test", as the source has them."""
        return {side: self._labelled(side) for side in ("train", "test")}

    def origin(self) -> str:
        """Which files are read."""
        if self.path is not None:
            return f"local files in the layout of {self.repo}"
        return f"{self.repo} at {self._snapshot.commit}"

    def _labelled(self, side: str) -> TableSide:
        """One side's table, its images not decoded, and its labels."""
        table = undecoded(self._table(side), self.image_column, (self.label_column,), self._key, side)
        return TableSide(table, class_labels(table, self.label_column, self._key, side))

    def _table(self, side: str) -> Any:
        split = self.train_split if side == "train" else self.test_split
        files = self._local_files(side, split) if self.path is not None else self._snapshot.files[split]
        return read_table(files, self._key)

    @cached_property
    def _snapshot(self) -> Snapshot:
        """The hub's files on this machine, downloaded if need be."""
        [wanted] = self.repositories()
        snapshot = fetch(wanted)
        log.info("data %s: %s at %s, in %s", self.name, self.repo, snapshot.commit[:8], snapshot.folder)
        return snapshot

    def _folder(self) -> Path:
        return existing_path(self.path, self.name, self._wanted_layout())

    def _wanted_layout(self) -> str:
        files = " and ".join(f"data/{split}-*.parquet" for split in dict.fromkeys((self.train_split, self.test_split)))
        return f"a folder with {files}"

    def _local_files(self, side: str, split: str) -> list[Path]:
        folder = self._folder()
        # A copy that calls its test side "test" will do where the hub's is called "valid".
        by_split = split_files(folder, (split, side))
        files = by_split[split] or by_split[side]
        missing = incomplete(files)
        if not files or missing:
            reason = f"{missing} is missing" if missing else f"no {split}-*.parquet at any depth"
            raise UserError(
                f"data.path={folder} has no readable {side} split: {reason}",
                f"the parquet layout of {self.repo}: {self._wanted_layout().removeprefix('a folder with ')};"
                " or images in train/<class>/* and test/<class>/*",
            )
        return files

    def _class_folders(self) -> ImageFolder | None:
        """The local folder as images in class folders; None if it holds parquet files, or neither."""
        if self.path is None:
            return None
        folder = self._folder()
        if any(folder.rglob("*.parquet")) or not class_names(folder / "train"):
            return None
        return ImageFolder(self.name, self.path, self.classes, self.per_class, self.test_per_class)


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
    path: str | None = field(default=None, metadata=NOT_IDENTITY)
    classes: int | None = None
    per_class: int | None = None
    test_per_class: int | None = None

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


def existing_path(path: str | None, data: str, wanted: str) -> Path:
    """`path` expanded, if it exists; otherwise a UserError that says what `data.path` should be."""
    if path is None:
        raise UserError(f"data={data} needs data.path", f"data.path={wanted}")
    expanded = Path(path).expanduser()
    if not expanded.exists():
        raise UserError(f"data.path={path} does not exist", wanted)
    return expanded
