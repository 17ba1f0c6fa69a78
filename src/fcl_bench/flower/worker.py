"""The resident worker of a node: keeps torch, the data and the clients' states between turns, and does the turns."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fcl_bench.engine.clients import Clients
from fcl_bench.engine.remote.host import answered
from fcl_bench.engine.remote.process_info import ProcessInfo
from fcl_bench.engine.remote.replies import Received, on, reply_said, serialise
from fcl_bench.errors import UserError
from fcl_bench.flower import frames
from fcl_bench.flower.client_versions import Versions
from fcl_bench.flower.turns import PROTOCOL, Asked, Tag
from fcl_bench.protocol.message import Message

log = logging.getLogger(__name__)

#: The exit status of a worker whose turn took longer than the server waits; its parent process starts another one.
TOO_LONG = 75


class Site(NamedTuple):
    """What a node derives from a run's configuration and its own data.

    Attributes:
        clients: of the whole federation.
        inputs: the samples of the node's own clients, as `Clients.node` takes them.
        data: hash of the node's data.
    """

    clients: Clients
    inputs: torch.Tensor
    data: str


class _Open:
    """The run at hand."""

    def __init__(self, name: str, run: dict[str, Any], site: Site, own: list[int], versions: Versions) -> None:
        self.run, self.data, self.versions = run, site.data, versions
        self.device = site.clients.context.device
        self.node = site.clients.node(site.inputs, own)
        self.census = ProcessInfo.of(name, site.clients, own, self.node.data.raw)
        #: Per client, after which turn it kept what is in memory.
        self.at: dict[int, Tag | None] = {}


class Worker:
    """Answers what the server asks of the clients of one node.

    Args:
        own: who lives here.
        folder: where their states are kept, one folder for each run.
        make: the site of a run, from what the server says of it.
    """

    def __init__(self, own: Sequence[int], folder: Path, make: Callable[[dict[str, Any]], Site]) -> None:
        self._own = sorted(own)
        self._name = f"the node of client{'s' if len(own) > 1 else ''} {', '.join(map(str, self._own))}"
        self._folder, self._make = folder, make
        self._open: _Open | None = None

    def serve(self, listener: socket.socket) -> None:
        """Answer one request after the other, for ever."""
        while True:
            line, _ = listener.accept()
            # The asking process may have been killed since.
            with line, contextlib.suppress(ConnectionError):
                asked = frames.receive(line)
                if asked is not None:
                    frames.send(line, {}, self.answer(asked.blobs[0]))

    def answer(self, request: bytes) -> list[bytes]:
        """Return the answers to a request, errors included."""
        return list(answered(request, self._answers))

    def _answers(self, request: Received) -> Iterator[bytes]:
        about = request.beside
        try:
            at_hand = self._opened(about["run"])
        except UserError as error:
            raise UserError(f"{self._name}: {error.what}", error.remedy) from error
        if request.kind == "census":
            beside = {"protocol": PROTOCOL, "data": at_hand.data, "platform": platform.platform()}
            yield serialise("census", **at_hand.census.state(), beside=beside)
        elif request.kind == "turn":
            with _no_longer_than(float(about["seconds"])):
                yield from self._turns(at_hand, request.message, [Asked.read(turn) for turn in about["turns"]])
        elif request.kind == "forget":
            at_hand.versions.forget()
            yield serialise("forgotten")
        else:
            raise ValueError(f"{request.kind} is nothing that a node does")

    def _opened(self, run: dict[str, Any]) -> _Open:
        if self._open is None or self._open.run != run:
            self._open = None  # what the last run held, before the next one's data come
            versions = Versions(self._folder / f"{run['id']}-{run['stage']}")
            self._open = _Open(self._name, run, self._make(run), self._own, versions)
            log.info("run %s: clients %s are ready", run["id"], ", ".join(map(str, self._own)))
        return self._open

    def _turns(self, at_hand: _Open, broadcast: Message, turns: Sequence[Asked]) -> Iterator[bytes]:
        node, versions, tag = at_hand.node, at_hand.versions, Tag(broadcast.task, broadcast.round)
        broadcast = on(broadcast, at_hand.device)
        for turn in turns:
            client = turn.client
            node.commit()
            if client not in at_hand.at or at_hand.at[client] != turn.kept:
                node.resume(client, {} if turn.kept is None else versions.load(client, turn.kept))
            # From here on memory has no turn's state, should this one fail.
            at_hand.at.pop(client, None)
            versions.prune(client, (turn.kept, turn.safe))
            reply = node.turn(client, broadcast)
            if kept := node.keeps(client):
                versions.save(client, tag, kept)
            at_hand.at[client] = tag if kept else None
            log.info("task %d, round %d: client %d took %.1f s", tag.task, tag.round, client, reply.seconds)
            yield reply_said(reply)


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer than this: nobody waits for its answer any more."""

    def end() -> None:
        log.error("a turn took longer than the server waits (%g seconds); the worker starts anew", seconds)
        logging.shutdown()
        os._exit(TOO_LONG)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
