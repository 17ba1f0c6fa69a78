"""What `data=...` names, the data set that it loads once for all jobs of a process, and groups of its samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fcl_bench.data.images.stored import ArrayImages, Images
from fcl_bench.data.shared import described, shared
from fcl_bench.errors import UserError, kind_of, printable
from fcl_bench.files import content_hash, special, user_path

if TYPE_CHECKING:
    from fcl_bench.data.sources.hub import Repository

#: Bytes to locate one image on the disk: at most a path.
_PLACE = 500


@dataclass(frozen=True)
class Split:
    """One side (train or test) of a data set.

    Attributes:
        labels: (n,) int64, the labels as the source gives them.
        inputs: `Images`, an array (n, d) of features, or an array (n,) of texts as Python objects.
        fingerprint: hash of the inputs' content.
        domains: (n,) int64, each sample's domain; None where the source has none.
        clients: (n,) int64, the client that holds each training sample; None where the source does not say.
    """

    labels: np.ndarray
    inputs: Images | np.ndarray
    fingerprint: str
    domains: np.ndarray | None = None
    clients: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)


def kind_of_inputs(inputs: Any) -> str:
    """What the inputs of a split are: features, images or texts."""
    if not isinstance(inputs, np.ndarray):
        return "images"
    return "texts" if inputs.dtype == object else "features"


def array_hash(x: np.ndarray) -> str:
    """Hash of an array's type, shape and bytes."""
    digest = content_hash(f"{x.dtype} {x.shape}".encode())
    digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()


def image_split(labels: Any, images: Images, domains: np.ndarray | None = None) -> Split:
    return Split(np.asarray(labels, dtype=np.int64), images, images.fingerprint, domains)


@dataclass(frozen=True)
class Dataset:
    """A data set, ready to be cut into tasks: `train` and `test` hold images, or features.

    Attributes:
        class_names: names of the labels 0, 1, ..., in order; empty if the classes have no names besides the labels.
        domain_names: names of the numbers in `domains`, in order; empty where the source has none.
        origin: which files these are ("uoft-cs/cifar100 at aadb3af..."); empty where the data set's name suffices.
        elsewhere: whether the training samples stay at the clients' sites, so that there are none here.
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...] = field(default=(), kw_only=True)
    domain_names: tuple[str, ...] = field(default=(), kw_only=True)
    origin: str = field(default="", kw_only=True)
    elsewhere: bool = field(default=False, kw_only=True)

    @property
    def kind(self) -> str:
        """What samples are: features, images or texts."""
        return kind_of_inputs(self.train.inputs)

    @property
    def fingerprint(self) -> str:
        """Hash of the whole data set, labels and domains included."""
        digest = content_hash()
        for split in (self.train, self.test):
            digest.update(split.fingerprint.encode())
            digest.update(np.ascontiguousarray(split.labels).data)
            for name, values in (("domains", split.domains), ("clients", split.clients)):
                if values is not None:
                    digest.update(name.encode())
                    digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()


@dataclass
class About:
    """Facts for a reader and for `fcl-bench-data`; none of them changes a result.

    Args:
        classes: number of classes.
        train, test: number of images on each side, before any subset is taken; None: not known beforehand.
        megabytes: size of the download (10^6 bytes); None: there is none, or it is not known.
        licence: a note on the terms of use.
    """

    classes: int | None = None
    train: int | None = None
    test: int | None = None
    megabytes: int | None = None
    licence: str = ""


class Source(ABC):
    """What `data=...` names: typed knobs and a `load`.

    Attributes:
        about: what is known of the data set before it is loaded.
    """

    name: str
    about: About = About()

    @property
    def _key(self) -> str:
        """The data set's name in messages, as the user typed it."""
        path = getattr(self, "path", None)
        return f"data.path={path}" if path else f"data={self.name}"

    @abstractmethod
    def load(self) -> Dataset:
        """Read the data set. Raises a `UserError` for every problem that the user can fix."""

    def repositories(self) -> list[Repository]:
        """The hub repositories that the source needs; none if it reads local files."""
        return []


def parts(group_of_sample: np.ndarray, groups: int) -> list[np.ndarray]:
    """The ascending indices of each group's samples, given each sample's group (n,); -1 means no group."""
    by_group = np.argsort(group_of_sample, kind="stable")
    counts = np.bincount(group_of_sample + 1, minlength=groups + 1)
    return np.split(by_group, np.cumsum(counts)[:-1])[1:]


def rank_in_group(groups: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """How many samples of its group come before each sample (n,) int64, in ascending `order` (n,) or as they stand."""
    by_group = np.argsort(groups, kind="stable") if order is None else np.lexsort((order, groups))
    ordered = groups[by_group]
    rank = np.empty(len(groups), dtype=np.int64)
    rank[by_group] = np.arange(len(groups)) - np.searchsorted(ordered, ordered)
    return rank


def existing_path(path: str | None, data: str, wanted: str) -> Path:
    """`path` expanded, if it exists; otherwise raises a UserError that says what `data.path` should be."""
    if not path:
        raise UserError(f"data={data} needs data.path", f"data.path={wanted}")
    expanded = user_path("data.path", path)
    if not expanded.exists():
        raise UserError(f"data.path={path} does not exist", wanted)
    if not expanded.is_dir() and (found := special(expanded)):
        raise UserError(f"data.path={path} is {found}", wanted)
    if expanded.suffix == ".npz" and ".npz" not in wanted:
        raise UserError(
            f"data.path={path} is an .npz file, and data={data} reads {wanted}", f"data=features data.path={path}"
        )
    return expanded


def loaded(source: Source) -> Dataset:
    """The result of `source.load()`, or that of an earlier job of this process with the same knobs.

    Raises:
        UserError: it is not what `Dataset` and `Split` say, as may happen with a class of one's own.
    """
    return shared("dataset", described(source), lambda: _sound(source), _bytes)


def _sound(source: Source) -> Dataset:
    dataset, where = source.load(), f"{type(source).__name__}.load"
    if not isinstance(dataset, Dataset):
        raise UserError(f"{where} returned {kind_of(dataset)}", "a Dataset, such as Dataset(self.name, train, test)")
    for side in ("train", "test"):
        split, own = getattr(dataset, side), f"{where}: {side}"
        if not isinstance(split, Split):
            raise UserError(f"{own} is {kind_of(split)}", "a Split, such as Split(labels, inputs, fingerprint)")
        _require_numbers(f"{own}.labels", split.labels)
        _require_inputs(f"{own}.inputs", split.inputs)
        if split.domains is not None:
            _require_numbers(f"{own}.domains", split.domains)
        for name, values in (("inputs", split.inputs), ("domains", split.domains), ("clients", split.clients)):
            if values is not None and len(values) != len(split.labels):
                raise UserError(f"{own} has {len(split.labels)} labels and {len(values)} {name}", "as many of each")
    shapes = [side.inputs.shape[1:] for side in (dataset.train, dataset.test) if isinstance(side.inputs, np.ndarray)]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        found = f"{shapes[0][0]} features in train and {shapes[1][0]} in test"
        raise UserError(f"{where} gave {found}", "the same number in both")
    # The one place where names from files enter: without what a terminal would obey, and not longer than a line.
    return replace(dataset, class_names=_clean(dataset.class_names), domain_names=_clean(dataset.domain_names))


def _clean(names: Iterable[object]) -> tuple[str, ...]:
    return tuple(printable(str(name), "")[:500] for name in names)


def _require_numbers(where: str, values: Any) -> None:
    """Raise a `UserError` unless these are the numbers of samples' classes or domains."""
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        raise UserError(f"{where} is {kind_of(values)}", "an array (n,) of int64")
    if len(values) and values.min() < 0:
        raise UserError(f"{where} holds {values.min()}", "numbers from 0 on")


def _require_inputs(where: str, inputs: Any) -> None:
    if isinstance(inputs, np.ndarray):
        texts = inputs.ndim == 1 and all(isinstance(text, str) for text in inputs)
        right = texts or (inputs.ndim == 2 and inputs.shape[1] > 0 and inputs.dtype.kind in "fiu")
    else:
        right = isinstance(inputs, Images)
    if not right:
        raise UserError(
            f"{where} is {kind_of(inputs)}",
            "features, an array (n, d) of numbers; texts, an array (n,); or images, such as ArrayImages(pixels)",
        )


def _bytes(dataset: Dataset) -> int:
    return sum(map(_side_bytes, (dataset.train, dataset.test)))


def _side_bytes(split: Split) -> int:
    """Bytes of the arrays and of the images' locations; encoded images stay in their files."""
    inputs = split.inputs.pixels if isinstance(split.inputs, ArrayImages) else split.inputs
    arrays = (split.labels, split.domains, inputs)
    places = 0 if isinstance(inputs, np.ndarray) else _PLACE * len(split)
    return places + sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
