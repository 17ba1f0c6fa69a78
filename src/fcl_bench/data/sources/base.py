"""What `data=...` names, and the data set that it loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fcl_bench.data.images.stored import Images
from fcl_bench.data.sources.hub import Repository
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash, special, user_path


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
    def holds_features(self) -> bool:
        return isinstance(self.train.inputs, np.ndarray)

    @property
    def fingerprint(self) -> str:
        """Hash of the whole data set, labels and domains included."""
        digest = content_hash()
        for split in (self.train, self.test):
            digest.update(split.fingerprint.encode())
            digest.update(np.ascontiguousarray(split.labels).data)
            if split.domains is not None:
                digest.update(b"domains")
                digest.update(np.ascontiguousarray(split.domains).data)
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

    @abstractmethod
    def load(self) -> Dataset:
        """Read the data set. Raises a `UserError` for every problem that the user can fix."""

    def reads(self) -> list[Path] | None:
        """The files and folders that, besides the knobs, determine the result of `load`; None: unknown. With this list,
        the jobs of one process load the data set once, and again when one of these files has changed.
        """
        return None

    def repositories(self) -> list[Repository]:
        """The hub repositories that the source needs; none if it reads local files."""
        return []

    def prepare(self) -> None:
        """Do the work that is needed once before all runs; the files of `repositories` are on this machine already."""
        return

    def whole(self) -> bool:
        """Whether the knobs retain all images that `about` counts."""
        return True


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
