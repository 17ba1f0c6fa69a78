"""The messages that clients and the server exchange: named tensors, and their properties."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, ItemsView, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: Bytes of `Message.samples` on the wire, and of `Message.clients`.
SAMPLES_BYTES = _CLIENTS = 8


@dataclass(frozen=True, eq=False)
class Message(Mapping[str, torch.Tensor]):
    """A flat mapping of names to tensors: all that a client and the server ever exchange.

    The author of a method fills in the tensors and what is special about them; the engine adds `task` and `round`, and
    gives an upload the `stage` of the broadcast that it answers.

    Attributes:
        tensors: what is sent.
        stage: what the exchange is for; the ledger counts the bytes of each stage separately.
        samples: how many samples the message is about, if the sender says so (8 bytes); None: it does not say.
        clients: how many clients' uploads this one is made of: 1; more if a node of a tree combined them (see
            `protocol.combining`), and then it takes 8 bytes; or more if it is the unmasked sum (`Context.sums`).
        symmetric: names of the matrices that are symmetric and positive semidefinite.
        per_class: names of the matrices that have a column for each class.
        factors: names of the matrices whose columns are unit vectors.
        summed: names of the tensors of which the server only needs the sum over the clients, so that secure aggregation
            or a tree may add them up on the way.
        kept: names of the tensors of a broadcast that never change again: a client that has received one keeps it, so
            it is sent, and counted, only once.
        task, round: of the exchange, from 0.
        sums_of: for an upload, which of its tensors are sums over samples (or means, extremes, the samples themselves),
            and which sum each of the client's labelled samples is in: whole numbers (n,), -1 for none; None: all are in
            one sum. A sum of one sample is that sample: the engine counts these (docs/explanation/privacy.md). It
            never leaves the client. Entries beyond the shard's n samples belong to samples that the client keeps.
        moments_of: like `sums_of`, for second moments: Gram matrices, covariances, their diagonals, bases of these.
    """

    tensors: Mapping[str, torch.Tensor]
    stage: str = "statistics"
    samples: int | None = None
    clients: int = field(default=1, kw_only=True)
    symmetric: Collection[str] = field(default=frozenset(), kw_only=True)
    per_class: Collection[str] = field(default=frozenset(), kw_only=True)
    factors: Collection[str] = field(default=frozenset(), kw_only=True)
    summed: Collection[str] = field(default=frozenset(), kw_only=True)
    kept: Collection[str] = field(default=frozenset(), kw_only=True)
    sums_of: Mapping[str, torch.Tensor | None] = field(default_factory=dict, kw_only=True)
    moments_of: Mapping[str, torch.Tensor | None] = field(default_factory=dict, kw_only=True)
    task: int = field(default=0, kw_only=True)
    round: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("symmetric", "per_class", "factors", "summed", "kept"):
            if type(names := getattr(self, name)) is not frozenset:
                object.__setattr__(self, name, frozenset(names))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    # `Mapping`'s own versions of these call `__getitem__` and catch exceptions, name by name, which is slower.
    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self.tensors.items()

    def get(self, name: str, default: Any = None) -> Any:
        return self.tensors.get(name, default)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Message:
        """The same message with other tensors and unchanged properties."""
        return dataclasses.replace(self, tensors=tensors)

    def to_be_sent(self, stage: str, task: int, round_: int) -> Message:
        """The message with what the engine adds, without the fields that only its sender's side may read."""
        return dataclasses.replace(self, stage=stage, task=task, round=round_, sums_of={}, moments_of={})

    @property
    def nbytes(self) -> int:
        """The payload in bytes: the tensors' values and the numbers of samples and clients, no names or framing."""
        return self.nbytes_without(())

    def nbytes_without(self, there: Collection[str]) -> int:
        """The payload in bytes for a receiver that keeps the tensors named in `there`."""
        values = sum(tensor.nbytes for name, tensor in self.items() if name not in there)
        return values + (0 if self.samples is None else SAMPLES_BYTES) + (0 if self.clients == 1 else _CLIENTS)
