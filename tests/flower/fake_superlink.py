"""Nodes of a federation in this process, and a link to them that loses what a test wants it to lose: no Flower."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fcl_bench.engine.remote.replies import deserialise
from fcl_bench.flower import connection as flower
from fcl_bench.flower.frames import REFUSED
from fcl_bench.flower.policy import OPEN, Policy
from fcl_bench.flower.relay import Answer, SuperLinkLost
from fcl_bench.flower.site import site_of
from fcl_bench.flower.worker import Site, Worker

Make = Callable[[dict[str, Any]], Site]


class FakeSuperLink:
    """Stands for a SuperLink and its SuperNodes.

    Args:
        folder: below which nodes keep their clients' states.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.workers: dict[str, Worker] = {}
        #: Nodes that the SuperLink counts as there, and that answer nothing any more.
        self.dead: set[str] = set()
        #: Called with node, kind and request before a request is answered; it may raise, or kill.
        self.before: Callable[[str, str, Any], None] = lambda node, kind, request: None
        self.log: list[tuple[str, str]] = []
        self._waiting: dict[str, tuple[str, bytes]] = {}
        self._count = 0

    def add_node(
        self, *own: int, make: Make | None = None, changes: dict[str, Any] | None = None, policy: Policy = OPEN
    ) -> str:
        """A node for these clients, in place of another one with the same folder."""
        self._count += 1
        name = f"node-{self._count}"
        folder = self._folder / "-".join(map(str, own))
        known = {"out": str(folder), "cache.dir": str(folder / "cache"), **(changes or {})}
        self.workers[name] = Worker(
            own, folder / "nodes", make or (lambda run: site_of(run, known, own, policy)), policy
        )
        return name

    # What `Relay` has.

    is_open = False

    def open(self) -> None:
        self._waiting.clear()

    def close(self) -> None:
        self._waiting.clear()

    def nodes(self) -> list[str]:
        return [*self.workers, *self.dead]

    def push(self, node: str, seconds: float, request: bytes) -> str | None:
        if node not in self.nodes():
            return None
        self._count += 1
        self._waiting[name := f"message-{self._count}"] = node, request
        return name

    def pull(self, messages: Mapping[str, int]) -> Iterator[Answer]:
        for name in [name for name in messages if name in self._waiting]:
            node, request = self._waiting[name]
            if node in self.dead:
                continue
            received = deserialise(request)
            self.log.append((node, received.kind))
            try:
                self.before(node, received.kind, received)
            except TimeoutError as error:
                del self._waiting[name]
                yield Answer(name, [], f"Flower's error 3: {error}")
                continue
            if node in self.dead:
                continue
            del self._waiting[name]
            blobs = self.workers[node].answer(request)
            if (size := sum(map(len, blobs))) > messages[name]:
                # As the relay does, which sees them before the server's process does.
                yield Answer(
                    name, [], f"{REFUSED}the answer has {size} bytes, and at most {messages[name]} are expected"
                )
            else:
                yield Answer(name, blobs)

    def kill(self, node: str) -> None:
        """The node is counted as there, and answers no more."""
        del self.workers[node]
        self.dead.add(node)


@contextlib.contextmanager
def reached(link: FakeSuperLink, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block in which `transport=flower` finds the link, and waits for nobody longer than it must."""
    with monkeypatch.context() as patch:
        patch.setattr(flower, "Relay", lambda address, authority, key: link)
        patch.setattr(flower, "require_flower", lambda user: None)
        patch.setattr("fcl_bench.flower.transport._LOOK", 0.01)
        patch.setattr("fcl_bench.flower.transport._LOOK_FOR_NODES", 0.02)
        patch.setattr("fcl_bench.flower.transport._AGAIN", 0.05)
        yield


def lost_link() -> SuperLinkLost:
    return SuperLinkLost("the SuperLink is gone")
