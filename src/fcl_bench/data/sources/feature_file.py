"""Ready features in a NumPy file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.array_file import ArrayFile, native_floats
from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash

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
                f"{self.where}: x_train has {train_d} features and x_test has {test_d}", "use one backbone for both"
            )
        return Dataset(self.name, *splits, class_names=names)

    def _split(self, x: np.ndarray, y: np.ndarray, side: str) -> Split:
        # Imported here, since listing data sets needs no torch.
        import torch

        from fcl_bench.data.images.finite import rows_not_finite

        where = f"{self.where}:"
        if x.ndim != 2 or x.shape[1] == 0 or x.dtype.kind not in "fiu" or x.dtype.itemsize > 8:
            raise UserError(
                f"{where} x_{side} has shape {x.shape} and type {x.dtype}",
                "numbers of at most 64 bits in an array of shape (n, d), d >= 1",
            )
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise UserError(
                f"{where} y_{side} has shape {y.shape} and type {y.dtype}", "integers or texts of shape (n,)"
            )
        if len(x) != len(y):
            raise UserError(
                f"{where} x_{side} has {len(x)} rows and y_{side} has {len(y)} labels",
                "one label for each row",
            )
        if len(y) and int(y.min()) < 0:
            raise UserError(f"{where} y_{side} holds the label {y.min()}", "labels are non-negative integers")
        if len(y) and int(y.max()) > np.iinfo(np.int64).max:
            raise UserError(f"{where} y_{side} holds the label {y.max()}", "labels below 2^63")
        x = native_floats(x)
        bad = rows_not_finite(torch.from_numpy(x))
        if len(bad):
            raise UserError(
                f"{where} x_{side} holds NaN or infinity in {len(bad)} rows, the first is row {int(bad[0])}",
                "every feature is a finite number",
            )
        digest = content_hash(f"{x.dtype} {x.shape}".encode())
        digest.update(x.data)
        return Split(y.astype(np.int64), x, digest.hexdigest())

    def _numbered(self, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
        """Replace text labels by numbers, in place; returns the names in that order, none for integer labels."""
        sides = ("y_train", "y_test")
        texts = [side for side in sides if arrays[side].dtype.kind in "US"]
        if not texts:
            return ()
        if len(texts) < 2:
            other = next(side for side in sides if side not in texts)
            raise UserError(
                f"{self.where}: {texts[0]} holds names and {other} has type {arrays[other].dtype}",
                "names in both, or integers in both",
            )
        decoded = {
            side: np.char.decode(arrays[side], "utf-8") if arrays[side].dtype.kind == "S" else arrays[side]
            for side in sides
        }
        names = np.unique(np.concatenate([decoded[side].ravel() for side in sides]))
        for side in sides:
            arrays[side] = np.searchsorted(names, decoded[side])
        return tuple(names.tolist())
