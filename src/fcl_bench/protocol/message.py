"""The messages that clients and the server exchange: named tensors, and their properties."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fcl_bench.errors import UserError, kind_of

#: Bytes of `Message.samples` on the wire, and of `Message.clients`.
SAMPLES_BYTES = _CLIENTS = 8


@dataclass(frozen=True, eq=False)
class Message(Mapping[str, torch.Tensor]):
    """A flat mapping of names to tensors: all that a client and the server ever exchange.

    The author of a method fills in the tensors; what is special about those of an upload is declared once, in
    `Method.uploads`. The engine adds `task` and `round`, and gives an upload the `stage` of the broadcast that it
    answers.

    Attributes:
        stage: what the exchange is for; the ledger counts the bytes of each stage separately.
        samples: how many samples the message is about, if the sender says so (8 bytes); None: it does not say.
        clients: how many clients' uploads this one is made of: 1; more if a node of a tree combined them (see
            `protocol.combining`), and then it takes 8 bytes; or more if it is the unmasked sum (`Context.sums`).
        cached: names of the tensors of a broadcast that never change again: a client that has received one keeps it, so
            it is sent, and counted, only once.
        task, round: of the exchange, from 0.
        groups: for an upload, by field that `leaks`, which sum each of the client's labelled samples is in: whole
            numbers (n,), -1 for none; None: all are in one sum. A field that is not named has one sum for each class if
            it has columns for classes, else one. Entries beyond the n samples belong to samples that the client
            retains. It never leaves the client.
    """

    tensors: Mapping[str, torch.Tensor]
    stage: str = "statistics"
    samples: int | None = None
    clients: int = field(default=1, kw_only=True)
    cached: Collection[str] = field(default=frozenset(), kw_only=True)
    groups: Mapping[str, torch.Tensor | None] = field(default_factory=dict, kw_only=True)
    task: int = field(default=0, kw_only=True)
    round: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.cached) is not frozenset:
            object.__setattr__(self, "cached", frozenset(self.cached))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Message:
        """The same message with other tensors and unchanged properties."""
        return dataclasses.replace(self, tensors=tensors)

    def to_be_sent(self, stage: str, task: int, round_: int) -> Message:
        """The message with what the engine adds, without what only its sender's side may read."""
        return dataclasses.replace(self, stage=stage, task=task, round=round_, groups={})

    def weight(self, weighting: str) -> float:
        """What a model counts in a mean over clients, by "samples" or "uniform"; a mean of models counts as all."""
        return float(self.samples or 0 if weighting == "samples" else self.clients)

    @property
    def nbytes(self) -> int:
        """The payload in bytes: the tensors' values and the numbers of samples and clients, no names or framing."""
        values = sum(tensor.nbytes for tensor in self.tensors.values())
        return values + (0 if self.samples is None else SAMPLES_BYTES) + (0 if self.clients == 1 else _CLIENTS)

    def nbytes_without(self, there: Collection[str]) -> int:
        """The payload in bytes for a receiver that keeps the tensors named in `there`."""
        return self.nbytes - sum(tensor.nbytes for name, tensor in self.tensors.items() if name in there)


def require_message(where: str, message: Any) -> None:
    """Raise a `UserError` unless what a method's `where` returned is a message of tensors."""
    if not isinstance(message, Message):
        raise UserError(f"{where} returned {kind_of(message)}", "a Message of named tensors")
    require_tensors(f"{where}: the message", message.tensors)


def require_tensors(where: str, tensors: Any) -> None:
    """Raise a `UserError` unless this is a mapping of names to tensors."""
    if not isinstance(tensors, Mapping):
        raise UserError(f"{where} is {kind_of(tensors)}", "a mapping of names to tensors, such as {}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{where} has {name}, which is {kind_of(tensor)}", "a tensor, such as torch.tensor(3)")
