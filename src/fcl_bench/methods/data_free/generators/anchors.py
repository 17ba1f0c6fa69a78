"""Anchors (LANDER): for every class a point to which the mapped features of its samples are drawn.

Clients keep their features in balls around anchors, and follow a teacher on synthetic images (`Bounded`).
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, mse_loss

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.errors import UserError, first_line
from fcl_bench.files import special, user_path
from fcl_bench.methods.data_free.generators.images import ImagePool
from fcl_bench.randomness import seeded
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

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


#: KD_2.
_TEMPERATURE = 2.0


def factors(seen: int, known: int) -> tuple[float, float]:
    """(1 + 1/a) / b and a b, the factors of `cur` and `pre` if `known` of `seen` classes are old."""
    a, b = math.log2(seen / 2 + 1), math.sqrt(known / seen)
    return (1 + 1 / a) / b, a * b


class Bounded(Objective):
    """The client's loss; it also adds up its values.

    Args:
        heads, over, rest: see `Objective`.
        pull, radius: ltc and r.
        anchors: (C, d_e) of all columns; None: ltc is 0.
        current: the factor of the task's own loss; 1 in the first task.
    """

    def __init__(
        self,
        heads: Heads,
        over: str,
        rest: bool,
        pull: float,
        radius: float,
        anchors: torch.Tensor | None,
        current: float,
    ) -> None:
        super().__init__(heads, over, rest)
        self._pull, self._radius, self._anchors, self._current = pull, radius, anchors, current
        self._losses: list[torch.Tensor] = []

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = network.body(inputs)
        loss = self.score_loss(network.logits(features), labels, inputs)
        if self._anchors is not None:
            assert isinstance(network, MappedNetwork)
            pulled = outside(network.mapping(features), self._anchors[labels], self._radius)
            loss = loss + self._pull * pulled
        loss = self.with_replay(network, self._current * loss)
        self._losses.append(loss.detach())
        return loss

    def with_replay(self, network: Network, loss: torch.Tensor) -> torch.Tensor:
        """Adds the terms of synthetic samples; here there are none."""
        return loss

    def first_pass(self, passes: int) -> torch.Tensor:
        """(1,) the sum of the losses of the first pass; all `passes` have the same number of batches."""
        losses = self._losses[: len(self._losses) // passes]
        return torch.stack(losses).float().sum(dim=0, keepdim=True) if losses else torch.zeros(1)


class Replaying(Bounded):
    """The client's loss with a teacher.

    Args:
        base: arguments of `Bounded`.
        teacher: frozen.
        pool: synthetic images, `count` in each step.
        previous: the factor of their terms.
    """

    def __init__(self, *base: Any, teacher: MappedNetwork, pool: ImagePool, count: int, previous: float) -> None:
        super().__init__(*base)
        self._teacher, self._pool, self._count, self._previous = teacher, pool, count, previous

    def with_replay(self, network: Network, loss: torch.Tensor) -> torch.Tensor:
        assert isinstance(network, MappedNetwork)
        images, _ = self._pool.next(self._count)
        features = network.body(images)
        with torch.no_grad():
            known = self._teacher.body(images)
            wanted, mapped = (self._teacher.logits(known) / _TEMPERATURE).softmax(dim=1), self._teacher.mapping(known)
        scores = network.logits(features)[:, : wanted.shape[1]]
        distilled = cross_entropy(scores / _TEMPERATURE, wanted)
        return loss + self._previous * (distilled + mse_loss(network.mapping(features), mapped))
