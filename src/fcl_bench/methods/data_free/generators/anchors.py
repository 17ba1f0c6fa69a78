"""Anchors (LANDER): for every class a point to which the mapped features of its samples are drawn."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from fcl_bench.backbones.trainable import Trainable
from fcl_bench.errors import UserError, first_line
from fcl_bench.files import special, user_path
from fcl_bench.randomness import seeded
from fcl_bench.training.network import Network

#: Root mean square of the entries of random anchors. Two of them are then as far apart, as a mean over entries, as two
#: of the text embeddings in LANDER's repository (CLIP, CIFAR-100): of those, less their mean, it is 0.200.
SPREAD = 0.2

#: The matrix in a file that holds all anchors in one.
_ROWS = "anchors"
_SUFFIXES = (".npz", ".safetensors")


class MappedNetwork(Network):
    """A network with a mapping A of its features to the space of the anchors.

    Args:
        start: the body in its initial weights.
        size: d_e, of an anchor.
        seed: of the mapping's first weights, which are torch's own for a linear layer.
    """

    def __init__(self, start: Trainable, size: int, seed: int) -> None:
        super().__init__(start)
        with seeded(seed):
            self.mapping = torch.nn.Linear(self.dimension, size)


def outside(points: torch.Tensor, anchors: torch.Tensor, radius: float) -> torch.Tensor:
    """LANDER's bounding loss B = relu(mse(a, e) - r): how far a batch is outside of the balls around its anchors.

    Args:
        points: (b, d_e) mapped features.
        anchors: (b, d_e) of their classes.
        radius: r, on the scale of the mean over samples and entries.
    """
    return torch.relu(torch.nn.functional.mse_loss(points, anchors.to(points)) - radius)


def random_anchors(columns: range, size: int, seed: int) -> torch.Tensor:
    """(c, size) anchors of the classes of `columns`; a class has the same one whichever others are requested.

    Those of columns 0 to size - 1 are orthogonal to each other, those of the next `size` columns again, and so on; all
    have the length 0.2 sqrt(size).
    """
    blocks = {column // size for column in columns}
    frames = {block: _frame(size, seed + block) for block in blocks}
    rows = [frames[column // size][column % size] for column in columns]
    return SPREAD * size**0.5 * torch.stack(rows).float() if rows else torch.zeros(0, size)


def _frame(size: int, seed: int) -> torch.Tensor:
    """(size, size) a random rotation or reflection, in float64."""
    drawn = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(drawn)
    return q * r.diagonal().sign()


def read_anchors(path: str, key: str) -> torch.Tensor:
    """(C, d_e) in float32, row by row for the data set's classes 0, 1, ...

    The file (.npz or .safetensors) holds a matrix `anchors`, or a vector for each class under its name. Names are taken
    in alphabetical order, which is how data sets number their classes; names that are numbers, in that of the numbers.

    Args:
        path: of the file.
        key: where the user set it, for messages.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    where, wanted = (
        f"{key}={path}",
        "random, or a .npz or .safetensors file with a matrix `anchors`, or a vector per class",
    )
    file = user_path(key, path)
    if file.suffix not in _SUFFIXES:
        raise UserError(f"{where} is no file of anchors", wanted)
    if not file.is_file():
        found = special(file)
        raise UserError(f"{where} {f'is {found}' if found else 'does not exist'}", wanted)
    try:
        held = _tensors(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{where} can't be read: {first_line(error)}", wanted) from error
    if _ROWS in held:
        rows = held[_ROWS]
    else:
        shapes = {tuple(vector.shape) for vector in held.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise UserError(f"{where} holds {_described(held)}", wanted)
        rows = torch.stack([held[name] for name in _ordered(held)])
    if rows.ndim != 2 or not rows.numel() or not rows.is_floating_point() or not bool(torch.isfinite(rows).all()):
        raise UserError(f"{where} holds no matrix of finite numbers: {_described(held)}", wanted)
    return rows.float()


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            return {name: torch.from_numpy(archive[name]) for name in archive.files}
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(first_line(error)) from error


def _ordered(names: dict[str, torch.Tensor]) -> list[str]:
    if all(name.isdecimal() for name in names):
        return sorted(names, key=int)
    return sorted(names)


def _described(held: dict[str, torch.Tensor]) -> str:
    first = [f"{name} {tuple(value.shape)}" for name, value in list(held.items())[:3]]
    return ", ".join(first) + (", ..." if len(held) > 3 else "") if held else "nothing"
