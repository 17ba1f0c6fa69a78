"""Arrays in a NumPy file that the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import Source, existing_path
from fcl_bench.errors import UserError
from fcl_bench.files import user_path


@dataclass
class ArrayFile(Source):
    """A source that reads one .npz file.

    Args:
        name: what tables call it.
        path: the file.
    """

    name: str = knob(filled=True, words="a name for tables")
    path: str | None = knob(None, identity=False)

    def reads(self) -> list[Path] | None:
        return [user_path("data.path", self.path)] if self.path else None

    @property
    def where(self) -> str:
        """The beginning of messages about the file."""
        return f"data.path={self.path}"

    def arrays(self, wanted: str, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """The arrays of these names. Raises a `UserError` that says what is `wanted` if a needed one is not there."""
        path = existing_path(self.path, self.name, wanted)
        if path.is_dir():
            raise UserError(f"{self.where} is a folder", wanted)
        try:
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise UserError(f"{self.where} holds a single array", wanted)
            with loaded as file:
                if missing := set(needed) - set(file.files):
                    raise UserError(f"{self.where} lacks {', '.join(sorted(missing))}", wanted)
                return {name: file[name] for name in (*needed, *optional) if name in file.files}
        except UserError:
            raise
        except Exception as error:  # NumPy, zipfile, zlib and tokenize raise many types on foreign bytes
            if isinstance(error, ValueError) and "Object arrays" in str(error):
                remedy = "arrays of numbers and of texts, such as numpy.array(labels, dtype=str)"
                raise UserError(f"{self.where} holds Python objects, which are never unpickled", remedy) from error
            raise UserError(f"{self.where} is not a readable .npz file", wanted) from error


def native_floats(x: np.ndarray) -> np.ndarray:
    """The same numbers contiguously, as floats in this machine's byte order; integers exactly, up to 2^53."""
    whole = np.float32 if x.dtype.itemsize <= 2 else np.float64
    return np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("=") if x.dtype.kind == "f" else whole)
