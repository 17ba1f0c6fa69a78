"""What `transport=...` names: how the server's process reaches the clients'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from fcl_bench.config import knob
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.transport import Transport


class Link(Protocol):
    """The processes of one run, for as long as it is at work."""

    def federate(self, clients: Clients, inputs: torch.Tensor, keep: Path) -> Transport:
        """The transport of one federation; the first stage is one of its own.

        Args:
            clients: of the federation.
            inputs: the samples of the whole data set, for the clients of this process.
            keep: the folder in which processes keep their clients' states: beside the server's checkpoint.

        Raises:
            UserError: processes differ in what changes results, or one is gone.
        """

    def about(self) -> dict[str, Any]:
        """What run.json says of the processes, beside the transport's name."""

    def complete(self) -> None:
        """The run is complete, and written: nothing that its clients kept is needed any more."""


@dataclass
class Reach(ABC):
    """How the clients are reached. The same clients give the same bits over every transport.

    So nothing of it is part of a run's id, but for knobs that let a round go on without some of its clients: those are
    `added` knobs, and part of the id when they are set.

    Attributes:
        name: of the choice.
        sees_everything: whether audits are possible.
        reaches_sites: whether clients may have samples that nobody else has (`data=sites`).
        minimum: the least share of a round's clients that has to answer; None: all.
    """

    name: ClassVar[str]
    sees_everything: ClassVar[bool] = False
    reaches_sites: ClassVar[bool] = False
    minimum: ClassVar[float | None] = None

    @abstractmethod
    def connect(self) -> AbstractContextManager[Link]:
        """Reach the processes for the block. Raises a `UserError` where that cannot be done."""


@dataclass
class PartialRounds(Reach):
    """A transport whose rounds may go on without clients that are lost on the way.

    Args:
        minimum: the least share of a round's clients that has to answer, 0 to 1; None: all, or the run ends at its last
            checkpoint.
        deadline: seconds after which a client that has not answered counts as lost; None: never.
    """

    minimum: float | None = knob(None, least=0, most=1, words="a share, 0 to 1", added=True)  # type: ignore[misc]
    deadline: float | None = knob(None, above=0, words="seconds", added=True)
