"""Ready features in a NumPy file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset, Source, Split, existing_path
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash, user_path


@dataclass
class FeatureFile(Source):
    """Ready features in an .npz file: x_train (n, d), y_train (n,), x_test, y_test.

    Labels are non-negative integers, or texts: the classes' names, which are numbered in alphabetical order.
    """

    name: str = knob("features", filled=True, words="a name for tables")
    path: str | None = knob(None, identity=False)

    def reads(self) -> list[Path] | None:
        return [user_path("data.path", self.path)] if self.path else None

    def load(self) -> Dataset:
        path = existing_path(self.path, self.name, "an .npz file with x_train, y_train, x_test, y_test")
        arrays = self._read(path)
        names = _numbered(path, arrays)
        splits = [self._split(path, arrays, side) for side in ("train", "test")]
        train_d, test_d = (split.inputs.shape[1] for split in splits)  # type: ignore[union-attr]
        if train_d != test_d:
            raise UserError(
                f"data.path={path}: x_train has {train_d} features and x_test has {test_d}",
                "use one backbone for both",
            )
        return Dataset(self.name, *splits, class_names=names)

    @staticmethod
    def _read(path: Path) -> dict[str, np.ndarray]:
        remedy = "an .npz file with the arrays x_train, y_train, x_test, y_test"
        if path.is_dir():
            raise UserError(f"data.path={path} is a folder", remedy)
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
        except ValueError as error:
            if "Object arrays" not in str(error):
                raise UserError(f"data.path={path} is not a readable .npz file", remedy) from error
            remedy = "arrays of numbers and of texts, such as numpy.array(labels, dtype=str)"
            raise UserError(f"data.path={path} holds Python objects, which are never unpickled", remedy) from error
        except Exception as error:  # NumPy, zipfile, zlib and tokenize raise many types on foreign bytes
            raise UserError(f"data.path={path} is not a readable .npz file", remedy) from error

    @staticmethod
    def _split(path: Path, arrays: dict[str, np.ndarray], side: str) -> Split:
        # Imported here, since listing data sets needs no torch.
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
        digest = content_hash(f"{x.dtype} {x.shape}".encode())
        digest.update(x.data)
        return Split(y.astype(np.int64), x, digest.hexdigest())


def _numbered(path: Path, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    """Replace text labels by numbers, in place; returns the names in that order, none for integer labels."""
    sides = ("y_train", "y_test")
    texts = [side for side in sides if arrays[side].dtype.kind in "US"]
    if not texts:
        return ()
    if len(texts) < 2:
        other = next(side for side in sides if side not in texts)
        raise UserError(
            f"data.path={path}: {texts[0]} holds names and {other} has type {arrays[other].dtype}",
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
