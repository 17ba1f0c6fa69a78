"""NumPy files that the user gives: ready features, or a site's own samples, which never leave the site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset, Source, Split, array_hash, existing_path
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash


@dataclass
class ArrayFile(Source):
    """A source that reads one .npz file."""

    name: str = knob(filled=True, words="a name for tables")
    path: str | None = knob(None, identity=False)

    def arrays(self, wanted: str, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """The arrays of these names. Raises a `UserError` that says what is `wanted` if a needed one is not there."""
        path = existing_path(self.path, self.name, wanted)
        if path.is_dir():
            raise UserError(f"{self._key} is a folder", wanted)
        try:
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise UserError(f"{self._key} holds a single array", wanted)
            with loaded as file:
                if missing := set(needed) - set(file.files):
                    raise UserError(f"{self._key} lacks {', '.join(sorted(missing))}", wanted)
                return {name: np.asarray(file[name]) for name in (*needed, *optional) if name in file.files}
        except UserError:
            raise
        except Exception as error:  # NumPy, zipfile, zlib and tokenize raise many types on foreign bytes
            if isinstance(error, ValueError) and "Object arrays" in str(error):
                remedy = "arrays of numbers and of texts, such as numpy.array(labels, dtype=str)"
                raise UserError(f"{self._key} holds Python objects, which are never unpickled", remedy) from error
            raise UserError(f"{self._key} is not a readable .npz file", wanted) from error


def native_floats(x: np.ndarray) -> np.ndarray:
    """The same numbers contiguously, as floats in this machine's byte order; integers exactly, up to 2^53."""
    whole = np.float32 if x.dtype.itemsize <= 2 else np.float64
    return np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("=") if x.dtype.kind == "f" else whole)


_NAMES = ("x_train", "y_train", "x_test", "y_test")


@dataclass
class FeatureFile(ArrayFile):
    """Ready features in an .npz file: x_train (n, d), y_train (n,), x_test, y_test.

    Labels are non-negative integers, or texts: the classes' names, which are numbered in alphabetical order.
    """

    name: str = knob("features", filled=True, words="a name for tables")

    def load(self) -> Dataset:
        arrays = self.arrays(f"an .npz file with the arrays {', '.join(_NAMES)}", _NAMES)
        names = self._numbered(arrays)
        splits = [self._split(arrays[f"x_{side}"], arrays[f"y_{side}"], side) for side in ("train", "test")]
        train_d, test_d = (arrays[f"x_{side}"].shape[1] for side in ("train", "test"))
        if train_d != test_d:
            raise UserError(
                f"{self._key}: x_train has {train_d} features and x_test has {test_d}", "use one backbone for both"
            )
        return Dataset(self.name, *splits, class_names=names)

    def _split(self, x: np.ndarray, y: np.ndarray, side: str) -> Split:
        # Imported here, since listing data sets needs no torch.
        import torch

        from fcl_bench.linalg.tensors import rows_not_finite

        where = f"{self._key}:"
        if x.ndim != 2 or x.shape[1] == 0 or x.dtype.kind not in "fiu" or x.dtype.itemsize > 8:
            raise UserError(
                f"{where} x_{side} has shape {x.shape} and type {x.dtype}",
                "numbers of at most 64 bits in an array of shape (n, d), d >= 1",
            )
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise UserError(f"{where} y_{side} has shape {y.shape} and type {y.dtype}", "integers or texts (n,)")
        if len(x) != len(y):
            raise UserError(f"{where} x_{side} has {len(x)} rows and y_{side} has {len(y)} labels", "as many of both")
        if wrong := [int(end) for end in (y.min(), y.max()) if not 0 <= int(end) < 2**63] if len(y) else []:
            raise UserError(f"{where} y_{side} holds the label {wrong[0]}", "integers from 0 to 2^63 - 1")
        x = native_floats(x)
        bad = rows_not_finite(torch.from_numpy(x))
        if len(bad):
            raise UserError(
                f"{where} x_{side} holds NaN or infinity in {len(bad)} rows, the first is row {int(bad[0])}",
                "every feature is a finite number",
            )
        return Split(y.astype(np.int64), x, array_hash(x))

    def _numbered(self, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
        """Replace text labels by numbers, in place; returns the names in that order, none for integer labels."""
        sides = ("y_train", "y_test")
        texts = [side for side in sides if arrays[side].dtype.kind in "US"]
        if not texts:
            return ()
        if len(texts) < 2:
            other = next(side for side in sides if side not in texts)
            raise UserError(
                f"{self._key}: {texts[0]} holds names and {other} has type {arrays[other].dtype}",
                "names in both, or integers in both",
            )
        try:
            decoded = {
                side: np.char.decode(own, "utf-8") if (own := arrays[side]).dtype.kind == "S" else own for side in sides
            }
            names = np.unique(np.concatenate([decoded[side].ravel() for side in sides]))
            found = tuple(names.tolist())
        except (ValueError, SystemError) as error:  # bytes that are no UTF-8, numbers that are no characters
            raise UserError(
                f"{self._key}: {' and '.join(sides)} hold names that are no text", "names in UTF-8"
            ) from error
        for side in sides:
            arrays[side] = np.searchsorted(names, decoded[side])
        return found


_WANTED = "an .npz file with x (n, d), column (n,) and task (n,), both from 0; at a site labelled (n,), true or false"


@dataclass(frozen=True)
class SiteSamples:
    """The contents of a site's file or the server's.

    Attributes:
        x: (n, d) features.
        column: (n,) int64, the class of each sample as a column of the label matrix, -1 where it is unknown.
        task: (n,) int64.
        labelled: (n,) bool, whether the client knows the class.
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
            raise UserError(f"{self._key}: {(~held.labelled).sum()} test samples have no label", "all have one")
        none = np.zeros(0, dtype=np.int64)
        train = Split(none, held.x[:0], content_hash(b"elsewhere").hexdigest(), none)
        test = Split(held.column, held.x, held.fingerprint, held.task)
        return Dataset(self.name, train, test, elsewhere=True)

    def read(self) -> SiteSamples:
        """The file's samples. Raises a `UserError` if the file does not have the form above."""
        arrays = self.arrays(_WANTED, ("x", "column", "task"), ("labelled",))
        where, x = f"{self._key}:", arrays["x"]
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
