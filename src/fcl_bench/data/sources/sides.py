"""One side (train or test) of an image data set, before its images are opened: what they are, and which are taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fcl_bench.data.images.stored import EncodedImages, FileImages, Images

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Side(ABC):
    """Samples of one side.

    Attributes:
        labels: (n,) int64.
        domains: (n,) int64, each sample's domain; None where there are none.
        rows: (n,) which of the side's images these are, ascending; None: all of them.
    """

    labels: np.ndarray
    domains: np.ndarray | None = field(default=None, kw_only=True)
    rows: np.ndarray | None = field(default=None, kw_only=True)

    def taken(self, kept: np.ndarray | None) -> Self:
        """The samples `kept` (ascending) of these; None: all."""
        if kept is None:
            return self
        rows = kept if self.rows is None else self.rows[kept]
        domains = None if self.domains is None else self.domains[kept]
        return replace(self, labels=self.labels[kept], domains=domains, rows=rows)

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
