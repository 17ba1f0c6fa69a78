"""The worker of a node: has torch, the data and the clients' states between turns, and does the turns."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fcl_bench.engine.blob import packed
from fcl_bench.engine.checkpoint import ClientStore, tensor_text, text_tensor
from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.remote.replies import Received, deserialise, on_device, serialise, serialise_reply
from fcl_bench.engine.transport import Clients
from fcl_bench.errors import UserError, printable
from fcl_bench.files import content_hash, replacing
from fcl_bench.flower import frames, signing
from fcl_bench.flower.identity import Identity
from fcl_bench.flower.ledger import LEDGER, SENT, SiteLedger
from fcl_bench.flower.node_registry import NodeInfo
from fcl_bench.flower.policy import Guarded, Policy
from fcl_bench.flower.refusals import DOES_NOT_FIT, INSIDE, STATE_LOST, TURN_FAILED, Refusal, refusing
from fcl_bench.options.withdrawal import receipt
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import Message

log = logging.getLogger(__name__)

#: The exit status of a worker whose turn took longer than the server waits; its parent process starts another one.
TOO_LONG = 75
#: The name of the hash of the turns that made a save, among its tensors.
_PAST = "turns before"


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
        noise: that only this site knows: `key`, a hash that no other has; `epsilon` of all uploads of the run, None: no
            server ordered one; `of_task`, `of_run`: for how many uploads it is. None: there is none.
        numbers: (n,) the number that the server gets for each sample of the file, should it be revealed; None: the
            samples are those of a data set that the server has, too.
    """

    clients: Clients
    inputs: torch.Tensor
    data: str
    noise: dict[str, Any] | None = None
    numbers: np.ndarray | None = None


class _Federation:
    """The clients of this node in one run."""

    def __init__(
        self, run: dict[str, Any], site: Site, own: list[int], folder: Path, ledger: SiteLedger, key: str | None
    ) -> None:
        self.run, self.site, self._ledger = run, site, ledger
        self._identity = Identity(run["id"], key, ledger.policy.peers)
        self.about = {"run": run["id"], "method": site.clients.method.name}
        self.node = site.clients.node(site.inputs, own)
        uploads = Uploads.of(site.clients.method, site.clients.context)
        self._guard = self.node.client = Guarded(self.node.client, ledger.policy, uploads)
        self._stores = {client: ClientStore(folder, run["id"], f"client-{client}") for client in own}
        #: Per client, the save whose state is in memory, and the hash of the turns that made it.
        self._current: dict[int, tuple[str | None, str]] = {}

    def turns(self, broadcast: Message, turns: Sequence[Turn]) -> Iterator[bytes]:
        """Do turns; yields the reply of each, or the number of the reason why there is none."""
        content, of_round = packed(broadcast), {name: getattr(broadcast, name) for name in ("task", "round", "stage")}
        broadcast = on_device(broadcast, self.site.clients.context.device)
        for turn in turns:
            entry = {"kind": "turn", **self.about, "client": turn.client, **of_round, "noise": self.site.noise}
            self._guard.fields = {}
            try:
                with refusing(TURN_FAILED):
                    asked = entry["asked"] = content_hash(content + self._begun(turn).encode()).hexdigest()
                    reply = self._turn(broadcast, turn.client, asked)
                    sent = packed(reply.upload, client=turn.client, asked=asked)
                    entry |= {"fields": self._guard.fields, "sent": content_hash(sent).hexdigest()}
                    self._ledger.require_left(entry)
                    if self.run["config"]["transport"]["withdrawal"]:  # the server will have no more than a receipt
                        name, copy = receipt(turn.client, reply.upload)
                        sent_before = self._ledger.path.with_name(SENT) / self.run["id"] / str(turn.client)
                        with replacing(sent_before / name, 0o600) as temporary:
                            temporary.write_bytes(copy)
                    blob = serialise_reply(reply)
            except Exception as error:
                code = reported(error)
                self._ledger.write({**entry, "left": False, "code": code, "fields": self._guard.fields})
                yield serialise("failed", clients=[turn.client], code=code)
            else:
                self._ledger.write({**entry, "left": True, "bytes": len(blob)})
                log.info("%s: client %d sends %s", save_name(broadcast), turn.client, ", ".join(self._guard.fields))
                yield blob

    def answers(self, request: Received) -> Iterator[bytes]:
        """What the clients' middlewares answer, or the number of the reason why they do not."""
        for client, own in request.parts():
            of_round = {name: getattr(own, name) for name in ("task", "round", "stage")}
            entry = {"kind": "ask", **self.about, "client": client, **of_round}
            try:
                if client not in self._stores:
                    raise ValueError(f"client {client} is of another node")
                with refusing(TURN_FAILED):
                    self._identity.require_signed(own)
                    reply = self.node.answer(client, own)
                    signed = self._identity.signed(client, reply.upload)
                    blob = serialise_reply(dataclasses.replace(reply, upload=signed))
            except Exception as error:
                code = reported(error)
                self._ledger.write({**entry, "left": False, "code": code})
                yield serialise("failed", clients=[client], code=code)
            else:
                self._ledger.write({**entry, "left": True, "bytes": len(blob)})
                yield blob

    def _begun(self, turn: Turn) -> str:
        """Restore the state with which a turn begins; returns the hash of the turns that made it."""
        client, state, checkpoint = turn
        store = self._stores[client]
        self.node.commit()
        # From here on memory has no turn's state, should this one fail.
        current, past = self._current.pop(client, (None, ""))
        if state is None or current != state:
            with refusing(STATE_LOST):
                saved = {} if state is None else store.restore(state, [client])
            past = tensor_text(saved.pop(f"{client}.{_PAST}")) if saved else ""
            self.node.resume(client, {key.partition(".")[2]: value for key, value in saved.items()})
        store.prune((state, checkpoint))
        return past

    def _turn(self, broadcast: Message, client: int, asked: str) -> Reply:
        node, name = self.node, save_name(broadcast)
        with node.computing():
            reply = node.turn(client, broadcast)
        if (alone := reply.revealed) is not None and (numbers := self.site.numbers) is not None:
            # With noise of its own, not even how many there would be without it.
            alone = None if self.site.noise else dataclasses.replace(alone, samples=numbers[alone.samples])
            reply = dataclasses.replace(reply, revealed=alone)
        if after := node.keeps(client):
            states = {f"{client}.{key}": value for key, value in after.items()}
            self._stores[client].save(name, [client], {**states, f"{client}.{_PAST}": text_tensor(asked)})
            self._current[client] = name, asked
        return reply

    def delete_states(self) -> None:
        for store in self._stores.values():
            store.delete()


class Worker:
    """Answers what the server asks of the clients of one node.

    Args:
        own: the clients of the node.
        folder: where their states are saved, one folder for each run, and the ledger.
        make: the site of a run, from what the server sends about it.
        policy: what may leave.
        key: file of the node's private key.
    """

    def __init__(
        self,
        own: Sequence[int],
        folder: Path,
        make: Callable[[dict[str, Any]], Site],
        policy: Policy,
        key: str | None = None,
    ) -> None:
        self._own = sorted(own)
        self._name = f"the node of client{'s' if len(own) > 1 else ''} {', '.join(map(str, self._own))}"
        self._folder, self._make, self._key = folder, make, key
        self._ledger = SiteLedger(folder / LEDGER, policy)
        self._federation: _Federation | None = None
        self._seen: dict[bytes, float] = {}  # signed requests

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
        """The answers to a request: of what went wrong, the number."""
        about = {"kind": "request", "run": "unknown", "method": "unknown"}
        try:
            received = deserialise(signing.opened(request, self._ledger.policy.server_key, self._seen))
            _folder_of(received.beside["run"])
            about |= {"kind": received.kind, "run": received.beside["run"]["id"]}
            return list(self._answers(received))
        except Exception as error:
            code = reported(error)
            self._ledger.write({**about, "left": False, "code": code})
            return [serialise("failed", clients=self._own, code=code)]

    def _answers(self, request: Received) -> Iterator[bytes]:
        about = request.beside
        federation = self._of_run(about["run"])
        if request.kind == "info":
            clients, raw = federation.site.clients, federation.node.data.raw
            info = NodeInfo.of(self._name, clients, self._own, raw, federation.site.data)
            blob = serialise("info", **dataclasses.asdict(info))
            self._ledger.write({"kind": "info", **federation.about, "left": True, "bytes": len(blob)})
            yield blob
        elif request.kind == "turn":
            with _no_longer_than(float(about["seconds"])):
                yield from federation.turns(request.message, [Turn(*turn) for turn in about["turns"]])
        elif request.kind == "ask":
            with _no_longer_than(float(about["seconds"])):
                yield from federation.answers(request)
        elif request.kind == "delete":
            federation.delete_states()
            yield serialise("deleted")
        else:
            raise ValueError(f"{request.kind} is nothing that a node does")

    def _of_run(self, run: dict[str, Any]) -> _Federation:
        if self._federation is None or self._federation.run != run:
            self._federation = None  # with the last run's data, before the next one's come
            folder = self._folder / _folder_of(run)
            self._federation = _Federation(run, self._make(run), self._own, folder, self._ledger, self._key)
            log.info("run %s: clients %s are ready", run["id"], ", ".join(map(str, self._own)))
        return self._federation


def _folder_of(run: dict[str, Any]) -> str:
    """The name of a run's folder. Raises a `UserError` for what leads elsewhere, or writes lines of its own."""
    folder = f"{run['id']}-{run['stage']}"
    if not re.fullmatch(r"[\w-]{1,80}", folder, re.ASCII):
        raise UserError(f"{folder!r} is no name of a run", "a run of fcl-bench")
    return folder


def reported(error: Exception) -> int:
    """The number of an error, for the server; the error itself goes to this node's log."""
    code = error.code if isinstance(error, Refusal) else DOES_NOT_FIT if isinstance(error, UserError) else INSIDE
    log.error("error %d: %s", code, printable(str(error)), exc_info=None if isinstance(error, UserError) else error)
    return code


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
