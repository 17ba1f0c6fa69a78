"""Helpers to run public code in settings that it was not made for: our order of samples, no GPU, fewer packages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from benchmarks.peers.settings import Row


def use(folder: Path) -> None:
    """Import from this folder of a checkout before anything else."""
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))


class Unused:
    """Whatever a stub is asked for: may be imported, compared and named, but not called."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("the timed part calls what an adapter has put a stub for")


class Stub(ModuleType):
    """A module of which every name is `Unused`."""

    #: So that it may have modules inside.
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused


def stub(*names: str) -> None:
    """Let these modules be imported without being there."""
    sys.modules.update({name: Stub(name) for name in names})


def package(name: str, folder: Path, **members: Any) -> None:
    """A package whose modules are in `folder`, but whose own `__init__`, which imports all of them, does not run."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    vars(module).update(members)
    sys.modules[name] = module


def without_gpu() -> None:
    """`cuda()` of tensors and modules leaves them where they are."""
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def reading_here(loader: Callable[..., Any]) -> Callable[..., Any]:
    """The loader, reading in this process whatever it is told: what worker processes need would not be measured."""
    return functools.wraps(loader)(lambda *args, **options: loader(*args, **{**options, "num_workers": 0}))


class SameOrder:
    """Every `DataLoader` that is made from now on and shuffles takes our clients' order of samples.

    So all sides take the same batches.

    Args:
        row: whose clients.
        client_of: from a loader's data set to the client whose it is.
    """

    def __init__(self, row: Row, client_of: Callable[[Any], int]) -> None:
        self._row, self._client_of = row, client_of
        self._left: dict[int, Iterator[list[int]]] = {}
        #: Made before anything is timed.
        rounds = range(getattr(row, "rounds", 1))
        self._orders = [
            [order for round_ in rounds for order in row.orders(client, round_)] for client in range(row.clients)
        ]
        torch.utils.data.dataloader.RandomSampler = functools.partial(_Order, self)  # type: ignore[misc]

    def next_pass(self, samples: Any) -> list[int]:
        """Of the next pass over these samples."""
        client = self._client_of(samples)
        if client not in self._left:
            self._left[client] = iter(self._orders[client])
        return next(self._left[client])


class _Order(torch.utils.data.Sampler[int]):
    """In place of `RandomSampler`."""

    def __init__(self, same: SameOrder, data_source: Any, **_: object) -> None:
        self._same, self.data_source = same, data_source

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(self._same.next_pass(self.data_source))
