"""The information sent with a turn over Flower, and the names under which nodes keep clients' states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

#: Version of what the server and a node's worker say to each other; both ends compare it.
PROTOCOL = 1


class Tag(NamedTuple):
    """The turn after which a client saved its state: its task and round."""

    task: int
    round: int


@dataclass(frozen=True)
class Asked:
    """One client's turn.

    Attributes:
        client: the client whose turn it is.
        kept: the turn after which it saved the state that this turn begins with; None: it begins without a state.
        safe: the turn after which it saved the state that the server's last checkpoint continues from.
    """

    client: int
    kept: Tag | None
    safe: Tag | None

    def state(self) -> dict[str, Any]:
        """Return the turn as JSON."""
        return asdict(self)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Asked:
        """Return what `state` returned."""
        kept, safe = (None if said[name] is None else Tag(*said[name]) for name in ("kept", "safe"))
        return cls(int(said["client"]), kept, safe)


def tags_tensor(tags: Mapping[int, Tag], clients: int) -> torch.Tensor:
    """Return (K, 2) int64: task and round of each client's tag, -1 for none."""
    rows = torch.full((clients, 2), -1, dtype=torch.int64)
    for client, tag in tags.items():
        rows[client] = torch.tensor(tag)
    return rows


def tags_of(rows: Sequence[Sequence[int]]) -> dict[int, Tag]:
    """Return what `tags_tensor` was given, from its rows."""
    return {client: Tag(*row) for client, row in enumerate(rows) if row[0] >= 0}
