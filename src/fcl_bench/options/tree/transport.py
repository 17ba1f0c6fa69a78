"""Aggregators between the clients and the server, simulated in the server's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.config import knob
from fcl_bench.engine.in_process import Here
from fcl_bench.engine.transport import Connection, TransportChoice


@dataclass
class ThroughTree(TransportChoice):
    """All clients in the server's process, and nodes between them and the server (see `options.tree.tree`).

    Sums in another order give other bits, and merged sketches other numbers, so the tree is part of a run's id.

    Args:
        fan_in: the most children of a node, and of the server.
    """

    name: ClassVar[str] = "tree"
    sees_everything: ClassVar[bool] = True

    fan_in: int = knob(16, least=2)  # type: ignore[misc]

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        yield Here()
