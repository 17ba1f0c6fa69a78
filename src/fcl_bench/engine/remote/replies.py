"""Requests to a process of clients, and its answers, as bytes: one blob each (see `engine.blob`), nothing pickled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fcl_bench.engine.blob import BadMessage, fits, packed, unpacked
from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.single_sample_leakage import Leakage
from fcl_bench.errors import UserError
from fcl_bench.protocol.message import Message

#: What JSON holds of a reply.
_REPLY = {
    **dict.fromkeys(("client", "samples_kept", "accepted"), int),
    **{"seconds": float, "right": int | None, "stored": dict[str, int], "counts": dict[str, int]},
}
_LEAKAGE = {"sums": int, "moments": int, "samples": list[int]}


class RemoteError(RuntimeError):
    """A process of clients met an error that it cannot continue from; the message is its own."""


@dataclass(frozen=True)
class Received:
    """A request or an answer."""

    kind: str
    beside: dict[str, Any]
    message: Message

    def parts(self) -> Iterator[tuple[int, Message]]:
        """Each client, and its own of the messages that were sent `together`."""
        for client, blob in self.message.items():
            yield int(client), unpacked(blob.numpy().tobytes())[0]


def serialise(kind: str, message: Message | None = None, **beside: Any) -> bytes:
    """A request or an answer as bytes."""
    # A message without tensors says something, too.
    return packed(Message({}) if message is None else message, kind=kind, **beside)


def deserialise(blob: bytes | memoryview) -> Received:
    """What `serialise` returned.

    Raises:
        BadMessage: it is nothing of the sort.
        UserError: an answer that tells of one, in the other process's words.
        RemoteError: an answer that tells of another error.
    """
    message, beside = unpacked(blob)
    kind = beside.pop("kind", None)
    if not isinstance(kind, str):
        raise BadMessage("the message does not say what it is for")
    if kind == "user error":
        raise UserError(str(beside.get("what")), str(beside.get("remedy")))
    if kind == "error":
        raise RemoteError(str(beside.get("text")))
    return Received(kind, beside, message)


def serialise_reply(reply: Reply) -> bytes:
    """A reply as bytes; the guesses themselves stay where they are, and which sample is in which sum."""
    leakage = reply.revealed
    return serialise(
        "reply",
        reply.upload,
        client=reply.client,
        seconds=reply.seconds,
        stored=reply.stored,
        samples_kept=reply.samples_kept,
        accepted=reply.accepted,
        right=reply.right,
        counts=reply.counts,
        revealed=leakage and {**vars(leakage), "samples": leakage.samples.tolist()},
    )


def deserialise_reply(answer: Received) -> Reply:
    """What `serialise_reply` was given. Raises BadMessage for anything else."""
    about, leakage = answer.beside, answer.beside.pop("revealed", "missing")
    if answer.kind != "reply" or not fits(about, _REPLY) or not (leakage is None or fits(leakage, _LEAKAGE)):
        raise BadMessage(f"a reply was expected, and {answer.kind} came")
    if leakage is not None:
        leakage = Leakage(leakage["sums"], leakage["moments"], np.array(leakage["samples"], dtype=np.int64))
    return Reply(upload=answer.message, guesses=None, revealed=leakage, **{**about, "counts": Counter(about["counts"])})


def on_device(message: Message, device: torch.device) -> Message:
    """The message with its tensors on a device, in the layout they have."""
    if device.type == "cpu":
        return message
    return message.with_tensors({name: tensor.to(device) for name, tensor in message.items()})
