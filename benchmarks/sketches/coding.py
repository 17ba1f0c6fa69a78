"""How far lossless coders shrink what is left of the factors after rounding."""

from __future__ import annotations

import bz2
import importlib
import lzma
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from sketches.local import Local


class Coding:
    """How far lossless coders shrink the 8-bit factors of some uploads."""

    def __init__(self, rank: int, tasks: Sequence[int] = (0, 4, 9)) -> None:
        self.rank, self.tasks = rank, tasks
        self.size, self.coded, self.bits = 0, {}, {"entropy per column": 0.0, "entropy, sigma known per row": 0.0}

    def __call__(self, task: int, clients: list[Local]) -> None:
        for one in clients if task in self.tasks else []:
            V = one.hidden.top.V[:, : self.rank]
            scale = V.abs().amax(0) / 127
            q = (V / scale).round().to(torch.int8).numpy()
            steps = np.diff(q.astype(np.int16), axis=0, prepend=0).astype(np.uint8)  # modulo 256: it can be undone
            forms = {"columns": q.T, "rows": q, "differences": steps.T, "sorted by row size": sorted_(q)}
            self.size += q.size
            for form, array in forms.items():
                raw = np.ascontiguousarray(array).tobytes()
                for name, coder in coders().items():
                    key = f"{name}, {form}"
                    self.coded[key] = self.coded.get(key, 0) + len(coder(raw))
            row = torch.linalg.vector_norm(V / scale, dim=1) / math.sqrt(V.shape[1])
            for column in q.T:
                share = np.bincount(column.astype(np.int16) + 128, minlength=256) / len(column)
                share = share[share > 0]
                self.bits["entropy per column"] -= len(column) * float(share @ np.log2(share))
            edges = torch.from_numpy(q.astype(np.float64))
            width = row.clamp_min(1e-9)[:, None]
            mass = torch.special.ndtr((edges + 0.5) / width) - torch.special.ndtr((edges - 0.5) / width)
            self.bits["entropy, sigma known per row"] -= float(mass.clamp_min(1e-30).log2().sum())

    def rows(self) -> list[tuple[str, float]]:
        """Coded over raw bytes, best first."""
        found = {**self.coded, **{name: bits / 8 for name, bits in self.bits.items()}}
        return sorted(((name, size / self.size) for name, size in found.items()), key=lambda pair: pair[1])


def sorted_(q: np.ndarray) -> np.ndarray:
    """Columns, the rows in the order of their size, which costs bytes of its own unless the server knows it."""
    return q[np.argsort(np.abs(q.astype(np.int16)).sum(1))].T


def coders() -> dict[str, Callable[[bytes], bytes]]:
    """Those of the standard library, and of zstandard and brotli where they are installed."""
    found: dict[str, Callable[[bytes], bytes]] = {
        "zlib": lambda raw: zlib.compress(raw, 9),
        "bz2": lambda raw: bz2.compress(raw, 9),
        "lzma": lambda raw: lzma.compress(raw, preset=9),
    }
    for name in ("zstandard", "brotli"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        found[name] = module.ZstdCompressor(level=19).compress if name == "zstandard" else module.compress
    return found
