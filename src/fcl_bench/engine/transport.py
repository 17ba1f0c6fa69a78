"""Clients as a value, how broadcasts reach them and uploads come back, and what each choice of `transport=` has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch

from fcl_bench.config import counting, knob
from fcl_bench.data.partitions.base import Holdings
from fcl_bench.engine.codec import Codec, Middleware, chained
from fcl_bench.engine.node import UNKNOWN, Node, NodeData
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.method import Method

if TYPE_CHECKING:
    from fcl_bench.backbones.backbone import Extractor
    from fcl_bench.data.sources.base import Split
    from fcl_bench.engine.codec import RawSamples
    from fcl_bench.engine.exchange import Answer, Lost, Reply
    from fcl_bench.engine.remote.replies import Received
    from fcl_bench.protocol.message import Message


#: `transport.rounds`: all clients learn one task after the other; each sends each of its tasks' uploads at any time.
SYNCHRONOUS, OPEN_ROUNDS = "synchronous", "open"
#: The clients of a process, ascending; and what it answers to a request.
OwnClients: TypeAlias = "Callable[[Clients], Sequence[int]]"
Answers: TypeAlias = "Callable[[Received], Iterator[bytes]]"


@dataclass(frozen=True)
class Clients:
    """All that determines what each client does, except the samples themselves.

    Attributes:
        holdings: [task][client] -> indices of training samples.
        labelled: (n,) bool, which of these labels their clients know.
        run: identity of the work under way; both ends compare it.
        stage: which of the run's federations it is: "run", or "adapt" for the first stage.
        config: the run's resolved configuration, for a node that was not started with it.
        classes: for samples that stay at the clients' sites, [task] -> the columns of its classes; empty: the samples
            are those of one data set.
        prepared: whether the samples are features of a network, which round by the threads of the process.
    """

    method: Method
    context: Context
    holdings: Sequence[Sequence[np.ndarray]]
    columns: np.ndarray
    labelled: np.ndarray
    middleware: Sequence[Middleware] = ()
    run: str = ""
    stage: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    classes: Sequence[Sequence[int]] = ()
    parallel: str = "1"
    prepared: bool = False

    @property
    def elsewhere(self) -> bool:
        """Whether the samples stay at the clients' sites: the server has none, and true labels are unknown."""
        return bool(self.classes)

    @property
    def count(self) -> int:
        """K."""
        return len(self.holdings[0])

    @property
    def tasks(self) -> int:
        """T."""
        return len(self.holdings)

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        """(K,) and (K,): how many samples of a task each client has, and how many of them are labelled."""
        holdings = Holdings.of(self.holdings[task])
        return holdings.sizes(), holdings.chosen(self.labelled)

    def rows(self, own: Collection[int]) -> np.ndarray:
        """The indices of the samples that these clients hold in any task, ascending."""
        parts = [clients[client] for clients in self.holdings for client in own]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)

    def node(self, inputs: torch.Tensor, own: Collection[int] | None = None) -> Node:
        """The node of some clients, which keeps only their samples.

        Args:
            inputs: the samples `rows(own)` in this order: features, or images in uint8.
            own: its clients; None: all clients, with the inputs of the whole data set.
        """
        holdings, columns, labelled, numbers = self.holdings, self.columns, self.labelled, None
        if own is not None:
            numbers = self.rows(own)
            if len(inputs) != len(numbers):
                raise ValueError(f"{len(inputs)} samples for clients that hold {len(numbers)}")
            columns, labelled = columns[numbers], labelled[numbers]
            nothing, own_clients = np.zeros(0, dtype=np.int64), frozenset(own)
            holdings = [
                Holdings.of(
                    np.searchsorted(numbers, clients[client]) if client in own_clients else nothing
                    for client in range(self.count)
                )
                for clients in self.holdings
            ]
        data = NodeData(self.context, holdings, np.where(labelled, columns, UNKNOWN), inputs, numbers)
        uploads = Uploads.of(self.method, self.context)
        chain = chained([*self.middleware, Codec(uploads, self.context.wire)])
        truth = None if self.elsewhere else self._right
        return Node(self.method.client(self.context), self.context, data, chain, uploads, truth)

    def _right(self, numbers: np.ndarray, guesses: torch.Tensor) -> int:
        """How many of the labels that a client gave these samples are true; the engine knows the true labels."""
        return int((guesses.cpu() == torch.from_numpy(self.columns[numbers])).sum())


class Transport(Protocol):
    """Carries messages between the server's process and the clients', wherever they are.

    Attributes:
        complete: whether every client that is asked answers in its round.
        everything: the clients' data, for audits; None where the server's process does not see them.
        raw: the cost of sending a sample as it is; None if it is unknown.
        strangers: whether clients are in processes that others than the server's user may have started.
        most: bytes of the largest reply that the next exchange may bring; a longer one is refused before it is read.
    """

    clients: int
    complete: bool
    strangers: bool
    most: int

    @property
    def raw(self) -> RawSamples | None: ...

    @property
    def everything(self) -> NodeData | None: ...

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        """(K,) and (K,): how many samples of a task each client has, and how many of them are labelled."""

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Answer]:
        """Run the broadcast's round: yields a reply for each client of `present`, in this order, not that of arrival.

        The order matters: FedRAN's sequential merge gives another result in another order. Late uploads of earlier
        rounds come first; their replies contain only the upload, which has its task and round. After clients with
        masked uploads comes the sum of these uploads.
        """

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        """The answers of clients' middlewares to requests of one kind and round, each client to its own, in this order.

        This is not a turn: the method is not called, and the replies contain only the answer and its seconds.
        """

    def refused(self, client: int) -> None:
        """The upload of the client's last turn was left out: its state is again the one before that turn."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The states of this process's clients. If clients are elsewhere, their states are saved there, and
        this is the name under which they find them again."""

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned. Raises a `UserError`: clients elsewhere no longer have their states."""


class Wrapper:
    """A transport around another one. It passes everything on to that one except what a subclass overrides."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.clients = inner.clients
        self.complete, self.strangers = False, inner.strangers

    @property
    def most(self) -> int:
        return self._inner.most

    @most.setter
    def most(self, most: int) -> None:
        self._inner.most = most

    @property
    def everything(self) -> NodeData | None:
        return self._inner.everything

    @property
    def raw(self) -> RawSamples | None:
        return self._inner.raw

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._inner.samples(task)

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Answer]:
        return self._inner.exchange(present, broadcast)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        return self._inner.ask(requests)

    def refused(self, client: int) -> None:
        self._inner.refused(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._inner.state_dict()

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self._inner.load_state_dict(states)


class Connection(ABC):
    """The processes of one run while it is at work."""

    def begin(self, run: str, context: Context, prepared: bool) -> None:  # noqa: B027
        """A run is to be done, and this is the server's process: nothing of it is under way yet.

        Raises:
            UserError: processes differ in what changes results.
        """

    @abstractmethod
    def federate(self, clients: Clients, inputs: torch.Tensor, states: Path) -> Transport:
        """The transport of one federation; the first stage is one of its own.

        Args:
            states: the folder for the states of each process's clients: beside the server's checkpoint.

        Raises:
            UserError: processes differ in what changes results, or one is gone.
        """

    def batches(self, extractor: Extractor, side: str, split: Split, start: int) -> Iterator[torch.Tensor]:
        """What `extractor.batches(split, start)` gives, from all processes that can help; `side`: train or test."""
        return extractor.batches(split, start)

    def hand_on(self, network: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Give processes that extract features the tensors of the network that the first stage trained."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What run.json says of the processes, beside the transport's name."""

    def data_of(self, clients: Clients) -> str:
        """Hash of the samples that stay at the clients' sites; of a transport that `reaches_sites`."""
        raise TypeError(f"{type(self).__name__} reaches no sites")

    def complete(self) -> None:  # noqa: B027
        """The run is complete, and written: its clients' states are not needed any more."""


@dataclass
class TransportChoice(ABC):
    """How the clients are reached. The same clients give the same bits over every transport.

    So nothing of it is part of a run's id, but for knobs that let a round go on without some of its clients. A tree,
    which does change bits, has knobs that always are.

    Attributes:
        sees_everything: whether audits are possible.
        reaches_sites: whether clients may have samples that nobody else has (`data=sites`).
        launched: whether a launcher starts all processes, each with the same command, so that this is one run.
        fan_in: of the tree of aggregators on the way to the server; None: there is none.
    """

    name: ClassVar[str]
    sees_everything: ClassVar[bool] = False
    reaches_sites: ClassVar[bool] = False
    launched: ClassVar[bool] = False
    withdrawal: ClassVar[bool] = False  # whether clients can be taken out again
    minimum: ClassVar[float | None] = None
    rounds: ClassVar[str] = SYNCHRONOUS
    order: ClassVar[str | None] = None  # in which uploads come, where it is drawn
    every: ClassVar[int | None] = None  # so many uploads the model is saved
    fan_in: ClassVar[int | None] = None

    def identity(self) -> dict[str, Any]:
        """The knobs that are part of a run's id: those that may change its result."""
        return counting(self)

    @property
    def follows(self) -> bool:
        """Whether this process has only clients, and does what another process asks for."""
        return False

    @property
    def speaks(self) -> bool:
        """Whether this process reports errors to the user, instead of leaving that to another one."""
        return True

    def follow(self, site: Callable[[str, OwnClients], Answers]) -> None:
        """Answer the server's process until the run is over; of a process that `follows`.

        Args:
            site: makes what answers from this process's name, for messages, and from which clients are its own.
        """
        raise TypeError(f"transport={self.name} has the server in this process")

    @abstractmethod
    def connect(self) -> AbstractContextManager[Connection]:
        """Connect to the processes for the block. Raises a `UserError` where that cannot be done."""


@dataclass
class PartialRounds(TransportChoice):
    """A transport whose rounds may go on without clients that are lost on the way."""

    minimum: float | None = knob(None, least=0, most=1, words="a share, 0 to 1")  # type: ignore[misc]
    deadline: float | None = knob(None, above=0, words="seconds")

    def identity(self) -> dict[str, Any]:
        # Where nobody may be missing, how long a round waits changes no result.
        return {} if self.minimum is None else counting(self)
