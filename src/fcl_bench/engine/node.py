"""The clients' side: their data, what they keep, and one turn of one of them. No server, no other client's data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fcl_bench.data.partitions.holdings import Holdings
from fcl_bench.engine.ledger import Stopwatch
from fcl_bench.engine.middleware import Middleware
from fcl_bench.engine.raw import RawSamples
from fcl_bench.engine.revealed import NOTHING, Grouped, Revealed, revealed
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client
from fcl_bench.protocol.problem import SAMPLE_KINDS, Problem, Shard, State

#: How many of the labels (m,) that a client gave its unlabelled samples are right, given these samples' numbers (m,) in
#: the data set. The engine's own count, beside the turn: a node has no true labels.
Truth = Callable[[np.ndarray, torch.Tensor], int]
#: The column of a training sample whose label its client does not know.
UNKNOWN = -1


class ClientData:
    """The samples of the clients of one node.

    Args:
        problem: device and type of the samples.
        holdings: [task] -> the indices of each client's training samples.
        columns: (n,) int64, the class of each sample as a column of the label matrix, `UNKNOWN` where its client does
            not know it: true labels of unlabelled samples do not come here.
        inputs: (n, ...) the samples; they move to the device, since a copy in each turn would cost more than what is
            done with it there.
        numbers: (n,) int64, the number of each sample in the whole data set; None: these are the whole data set.
    """

    def __init__(
        self,
        problem: Problem,
        holdings: Sequence[Sequence[np.ndarray]],
        columns: np.ndarray,
        inputs: torch.Tensor,
        numbers: np.ndarray | None = None,
    ) -> None:
        self._problem = problem
        self.holdings = [Holdings.of(clients) for clients in holdings]
        self._known = columns != UNKNOWN
        self._inputs = inputs.to(problem.device)
        self._labels = torch.from_numpy(columns).to(problem.device)
        self._numbers = numbers
        #: A task, and the indices of all clients' samples of it on the device.
        self._dealt: tuple[int, torch.Tensor] | None = None

    @property
    def clients(self) -> int:
        """K."""
        return len(self.holdings[0])

    def labelled(self, task: int) -> np.ndarray:
        """(K,) how many labelled samples each client has of a task."""
        return self.holdings[task].chosen(self._known)

    @property
    def raw(self) -> RawSamples:
        """What a sample would cost as it is."""
        return RawSamples.of(self._inputs, self._problem.wire)

    def samples(self, task: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of a client's labelled samples of a task, and of the others."""
        indices = self.holdings[task][client]
        known = self._known[indices]
        return (indices, indices[:0]) if known.all() else (indices[known], indices[~known])

    def shard(self, task: int, client: int) -> Shard:
        """What a client has of a task."""
        known, unknown = self.samples(task, client)
        chosen = torch.from_numpy(known).to(self._problem.device) if len(unknown) else self._own(task, client)
        labels = self._labels.index_select(0, chosen)
        return Shard(
            client, task, of_problem(self._inputs.index_select(0, chosen), self._problem), labels, self.inputs(unknown)
        )

    def _own(self, task: int, client: int) -> torch.Tensor:
        """Indices of a client's samples of a task, on the device."""
        held = self.holdings[task]
        # Of all clients at once, since a task has many rounds, and a copy in each turn costs more than a small one's.
        if self._dealt is None or self._dealt[0] != task:
            self._dealt = task, torch.from_numpy(held.indices).to(self._problem.device)
        return self._dealt[1][held.ends[client] : held.ends[client + 1]]

    def inputs(self, indices: np.ndarray) -> torch.Tensor:
        """Samples on the device."""
        return on_device(self._inputs, indices, self._problem)

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """The numbers that samples have in the whole data set."""
        return indices if self._numbers is None else self._numbers[indices]


def on_device(samples: torch.Tensor, indices: np.ndarray, problem: Problem) -> torch.Tensor:
    """A choice of samples on the device: images as they are, features in the statistics' type."""
    return of_problem(samples.index_select(0, torch.from_numpy(indices).to(samples.device)), problem)


def of_problem(samples: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Images as they are, features in the statistics' type."""
    return samples if samples.dtype == torch.uint8 else samples.to(problem.device, problem.dtype)


@dataclass(frozen=True)
class Reply:
    """What came of a turn.

    Attributes:
        client: whose turn it was.
        upload: as it travels.
        seconds: the client's own, from its shard to the upload on the wire.
        guesses: (m,) the labels that it gave its unlabelled samples, -1 for none; None: it left them alone. They are no
            part of the upload, and only a transport that sees everything has them.
        stored: bytes that the client keeps until its next turn, by kind (see `State`).
        samples_kept: how many raw samples are among it (see `SAMPLE_KINDS`).
        revealed: what the upload reveals of single samples, by what the client half says of it. Their numbers are those
            of the data set.
        grouped: what tells that of a sum of uploads; None where uploads are not added up.
        accepted: how many unlabelled samples it gave a label.
        right: how many of these labels are true; None where nobody knows.
    """

    client: int
    upload: Message
    seconds: float
    guesses: torch.Tensor | None
    stored: dict[str, int]
    samples_kept: int
    revealed: Revealed = NOTHING
    accepted: int = 0
    right: int | None = 0
    grouped: Grouped | None = None


@dataclass(frozen=True)
class Lost:
    """A client that gave no reply, and why."""

    client: int
    reason: str


@dataclass(frozen=True)
class Masked:
    """A client that has had its turn, and whose upload tells the server nothing until the `Total` comes."""

    reply: Reply


@dataclass(frozen=True)
class Total:
    """The sum of a round's masked uploads, and what it cost besides these.

    Attributes:
        clients: whose uploads it is of.
        upload: the sum.
        rounding: the most that an entry of it is off.
        up_bytes, down_bytes: (K,) of each client, those that were lost included.
        client_seconds: (K,) of each client.
        server_seconds: of the server.
    """

    clients: tuple[int, ...]
    upload: Message
    rounding: float
    up_bytes: np.ndarray
    down_bytes: np.ndarray
    client_seconds: np.ndarray
    server_seconds: float


@dataclass(frozen=True)
class Late:
    """A client that has had its turn, and whose upload arrives in a later round; the reply says what it cost."""

    reply: Reply


class Node:
    """Runs the turns of the clients that live in one process, and keeps their states.

    Args:
        client: the method's client half; it serves all clients of the node.
        problem: device and types.
        data: the clients' samples.
        middleware: what uploads and broadcasts pass through on this side.
        truth: what counts right guesses beside the turns; None: nobody knows the truth.
    """

    def __init__(
        self,
        client: Client,
        problem: Problem,
        data: ClientData,
        middleware: Middleware,
        truth: Truth | None = None,
    ) -> None:
        self.data = data
        self._client = client
        self._problem = problem
        self._middleware = middleware
        self._truth = truth
        self._states: dict[int, State] = {}
        #: What clients whose uploads may still be refused kept before their turns; None: nothing.
        self._before: dict[int, State | None] = {}

    def settle(self) -> None:
        """All uploads so far are taken in, or were refused."""
        self._before.clear()

    def turn(self, client: int, broadcast: Message) -> Reply:
        """One client's turn in the broadcast's task and round. Nothing of it stays here but the client's state."""
        task, round_ = broadcast.task, broadcast.round
        shard = self.data.shard(task, client)
        state = self._states.get(client, {})
        watch = Stopwatch(self._problem.device)
        with watch.running():
            received = self._middleware.receive(broadcast, client)
            guesses = self._client.pseudo_labels(shard)
            if guesses is not None:
                shard = shard.with_pseudo_labels(guesses)
            upload, state = self._client.update(shard, received, state)
        numbers = self._learnt_from(task, client, guesses)
        alone = revealed(upload, len(shard.labels))
        alone = dataclasses.replace(alone, samples=numbers[alone.samples])
        grouped = Grouped.of(upload, numbers) if self._problem.sums else None
        with watch.running():
            upload = dataclasses.replace(upload, stage=received.stage, task=task, round=round_)
            upload = self._middleware.send(upload.to_be_sent(), client)
        # A view would keep all that it is a part of.
        kept = {
            name: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
            for name, value in state.items()
        }
        self._before[client] = self._states.get(client)
        self._states[client] = kept
        accepted, right = self._counted(task, client, guesses)
        sizes = stored_bytes(kept), samples_in(kept)
        return Reply(client, upload, watch.seconds, guesses, *sizes, alone, accepted, right, grouped)

    def _learnt_from(self, task: int, client: int, guesses: torch.Tensor | None) -> np.ndarray:
        """The numbers in the data set of the samples that a client learnt from, in the order of its shard."""
        learnt, unlabelled = self.data.samples(task, client)
        if guesses is not None:
            learnt = np.concatenate([learnt, unlabelled[(guesses >= 0).cpu().numpy()]])
        return self.data.numbers(learnt)

    def _counted(self, task: int, client: int, guesses: torch.Tensor | None) -> tuple[int, int | None]:
        """How many labels a client gave itself, and how many of them are right."""
        if guesses is None:
            return 0, 0
        _, unlabelled = self.data.samples(task, client)
        right = None if self._truth is None else self._truth(self.data.numbers(unlabelled), guesses)
        return int((guesses >= 0).sum()), right

    def answer(self, client: int, request: Message) -> Reply:
        """What a client's middleware answers; the method is not asked, and no state changes.

        Raises:
            ValueError: no middleware knows such a request.
        """
        watch = Stopwatch(self._problem.device)
        with watch.running():
            answer = self._middleware.answer(client, request)
        if answer is None:
            raise ValueError(f"no middleware of this side answers to {request.stage!r}")
        return Reply(client, answer, watch.seconds, None, {}, 0)

    def take_back(self, client: int) -> None:
        """The upload of a turn since `settle` was left out: its client keeps what it kept before."""
        if client not in self._before:
            raise ValueError(f"client {client} has had no turn that could be taken back")
        state = self._before.pop(client)
        if state is None:
            del self._states[client]
        else:
            self._states[client] = state

    def keeps(self, client: int) -> State:
        """What one client keeps."""
        return self._states.get(client, {})

    def resume(self, client: int, state: State) -> None:
        """Have one client go on from what it kept."""
        self._states[client] = {name: value.to(self._problem.device) for name, value in state.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the clients keep: `<client>.<name>`."""
        return {f"{client}.{name}": value for client, state in self._states.items() for name, value in state.items()}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""
        self._states, self._before = {}, {}
        for key, value in states.items():
            client, _, name = key.partition(".")
            self._states.setdefault(int(client), {})[name] = value.to(self._problem.device)


def stored_bytes(state: State) -> dict[str, int]:
    """Bytes of a client's state by kind: what stands before the first dot of a name."""
    found: dict[str, int] = {}
    for name, value in state.items():
        kind = name.partition(".")[0]
        found[kind] = found.get(kind, 0) + value.nbytes
    return found


def samples_in(state: State) -> int:
    """How many rows of raw samples a client's state holds."""
    return sum(len(value) for name, value in state.items() if name.partition(".")[0] in SAMPLE_KINDS)
