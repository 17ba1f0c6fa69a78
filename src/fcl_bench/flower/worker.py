"""The worker of a node: has torch, the data and the clients' states between turns, and does the turns."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fcl_bench.engine.checkpoint import ClientStore
from fcl_bench.engine.remote.host import answered
from fcl_bench.engine.remote.replies import Received, on_device, serialise, serialise_reply
from fcl_bench.engine.transport import Clients
from fcl_bench.errors import UserError
from fcl_bench.flower import frames
from fcl_bench.flower.node_registry import NodeInfo
from fcl_bench.protocol.message import Message

log = logging.getLogger(__name__)

#: The exit status of a worker whose turn took longer than the server waits; its parent process starts another one.
TOO_LONG = 75


class Turn(NamedTuple):
    """One client's turn, as the server requests it.

    A turn begins with the state that the server names, so a turn done twice is one turn, and no separate message has to
    save or restore states, which would take seconds over Flower.

    Attributes:
        client: the client whose turn it is.
        state: the save with which the turn begins; None: it begins without a state.
        checkpoint: the save that the server's last checkpoint continues from.
    """

    client: int
    state: str | None
    checkpoint: str | None


def save_name(broadcast: Message) -> str:
    """The name of a client's save after its turn in the broadcast's round."""
    return f"task-{broadcast.task}-round-{broadcast.round}"


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


class _Federation:
    """The clients of this node in one run."""

    def __init__(self, name: str, run: dict[str, Any], site: Site, own: list[int], folder: Path) -> None:
        self.run = run
        self.node = site.clients.node(site.inputs, own)
        self.info = NodeInfo.of(name, site.clients, own, self.node.data.raw, site.data)
        self._device = site.clients.context.device
        #: Whether uploads have a site's own noise, so that replies do not say which samples they would tell without it.
        self._private = site.clients.elsewhere and bool(site.clients.middleware)
        self._stores = {client: ClientStore(folder, run["id"], f"client-{client}") for client in own}
        #: Per client, the save whose state is in memory.
        self._current: dict[int, str | None] = {}

    def turns(self, broadcast: Message, turns: Sequence[Turn]) -> Iterator[bytes]:
        """Do turns; yields the reply of each."""
        node, name = self.node, save_name(broadcast)
        broadcast = on_device(broadcast, self._device)
        for client, state, checkpoint in turns:
            store = self._stores[client]
            node.commit()
            if client not in self._current or self._current[client] != state:
                saved = {} if state is None else store.restore(state, [client])
                node.resume(client, {key.partition(".")[2]: value for key, value in saved.items()})
            # From here on memory has no turn's state, should this one fail.
            self._current.pop(client, None)
            store.prune((state, checkpoint))
            with node.computing():
                reply = node.turn(client, broadcast)
            reply = dataclasses.replace(reply, revealed=None) if self._private else reply
            if after := node.keeps(client):
                store.save(name, [client], {f"{client}.{key}": value for key, value in after.items()})
            self._current[client] = name if after else None
            log.info("%s: client %d took %.1f s", name, client, reply.seconds)
            yield serialise_reply(reply)

    def delete_states(self) -> None:
        for store in self._stores.values():
            store.delete()


class Worker:
    """Answers what the server asks of the clients of one node.

    Args:
        own: the clients of the node.
        folder: where their states are saved, one folder for each run.
        make: the site of a run, from what the server sends about it.
    """

    def __init__(self, own: Sequence[int], folder: Path, make: Callable[[dict[str, Any]], Site]) -> None:
        self._own = sorted(own)
        self._name = f"the node of client{'s' if len(own) > 1 else ''} {', '.join(map(str, self._own))}"
        self._folder, self._make = folder, make
        self._federation: _Federation | None = None

    def serve(self, listener: socket.socket) -> None:
        """Answer one request after the other, for ever."""
        while True:
            line, _ = listener.accept()
            # The asking process may have been killed since.
            with line, contextlib.suppress(ConnectionError):
                request = frames.receive(line)
                if request is not None:
                    frames.send(line, {}, self.answer(request.blobs[0]))

    def answer(self, request: bytes) -> list[bytes]:
        """The answers to a request, errors included."""
        return list(answered(request, self._answers))

    def _answers(self, request: Received) -> Iterator[bytes]:
        about = request.beside
        try:
            federation = self._of_run(about["run"])
        except UserError as error:
            raise UserError(f"{self._name}: {error.what}", error.remedy) from error
        if request.kind == "info":
            yield serialise("info", **dataclasses.asdict(federation.info))
        elif request.kind == "turn":
            with _no_longer_than(float(about["seconds"])):
                yield from federation.turns(request.message, [Turn(*turn) for turn in about["turns"]])
        elif request.kind == "delete":
            federation.delete_states()
            yield serialise("deleted")
        else:
            raise ValueError(f"{request.kind} is nothing that a node does")

    def _of_run(self, run: dict[str, Any]) -> _Federation:
        if self._federation is None or self._federation.run != run:
            self._federation = None  # with the last run's data, before the next one's come
            folder = self._folder / f"{run['id']}-{run['stage']}"
            self._federation = _Federation(self._name, run, self._make(run), self._own, folder)
            log.info("run %s: clients %s are ready", run["id"], ", ".join(map(str, self._own)))
        return self._federation


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
