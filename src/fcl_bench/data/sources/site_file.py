"""A NumPy file of one site's own samples, which never leaves the site; the server's test samples have the same form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.array_file import ArrayFile, native_floats
from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash

_WANTED = "an .npz file with x (n, d), column (n,) and task (n,), both from 0; at a site labelled (n,), true or false"


@dataclass(frozen=True)
class SiteSamples:
    """The contents of a site's file or the server's.

    Attributes:
        x: (n, d) features.
        column: (n,) int64, the class of each sample as a column of the label matrix, -1 where it is unknown.
        task: (n,) int64.
        labelled: (n,) bool, whether the client knows the class.
        fingerprint: hash of all these arrays.
    """

    x: np.ndarray
    column: np.ndarray
    task: np.ndarray
    labelled: np.ndarray
    fingerprint: str


@dataclass
class SiteFile(ArrayFile):
    """Ready features that stay at their site: x (n, d), column (n,), task (n,) and, at a site, labelled (n,)."""

    name: str = knob("sites", filled=True, words="a name for tables")

    def load(self) -> Dataset:
        """Load the server's file, which has test samples and no training samples."""
        held = self.read()
        if not held.labelled.all():
            raise UserError(f"{self.where}: {(~held.labelled).sum()} test samples have no label", "all have one")
        none = np.zeros(0, dtype=np.int64)
        train = Split(none, held.x[:0], content_hash(b"elsewhere").hexdigest(), none)
        test = Split(held.column, held.x, held.fingerprint, held.task)
        return Dataset(self.name, train, test, elsewhere=True)

    def read(self) -> SiteSamples:
        """The file's samples. Raises a `UserError` if the file does not have the form above."""
        arrays = self.arrays(_WANTED, ("x", "column", "task"), ("labelled",))
        where, x = f"{self.where}:", arrays["x"]
        if x.ndim != 2 or not x.shape[1] or x.dtype.kind != "f" or x.dtype.itemsize not in (4, 8):
            raise UserError(f"{where} x has shape {x.shape} and type {x.dtype}", "float32 or float64 of shape (n, d)")
        if not np.isfinite(x).all():
            raise UserError(f"{where} x holds NaN or infinity", "every feature is a finite number")
        labelled = arrays.get("labelled", np.ones(len(x), dtype=bool))
        for name, array, kinds in (
            ("column", arrays["column"], "iu"),
            ("task", arrays["task"], "iu"),
            ("labelled", labelled, "b"),
        ):
            if array.shape != (len(x),) or array.dtype.kind not in kinds:
                kind = "truth values" if kinds == "b" else "whole numbers"
                raise UserError(f"{where} {name} has shape {array.shape} and type {array.dtype}", f"{len(x)} {kind}")
        column, task = arrays["column"].astype(np.int64), arrays["task"].astype(np.int64)
        if len(x) and (task.min() < 0 or column[labelled].min(initial=0) < 0):
            raise UserError(f"{where} a task, or the column of a labelled sample, is below 0", "numbers from 0")
        digest = content_hash()
        for array in (x, column, task, labelled):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return SiteSamples(native_floats(x), column, task, labelled, digest.hexdigest())
