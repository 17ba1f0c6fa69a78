"""The clients' side: their data, their states, and single turns. A turn sees no server and no other client's data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.data.partitions.base import Holdings
from fcl_bench.engine.codec import Middleware, RawSamples
from fcl_bench.engine.exchange import Reply, Stopwatch
from fcl_bench.errors import UserError, kind_of
from fcl_bench.protocol.context import SAMPLE_KINDS, ClientData, Context, State
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import Message, require_message, require_tensors
from fcl_bench.protocol.method import Client

if TYPE_CHECKING:
    from fcl_bench.engine.single_sample_leakage import Grouped, Leakage

#: Counts how many of the labels (m,) that a client gave its unlabelled samples are right, given these samples' indices
#: (m,) in the data set. The engine counts them outside the turn: a node has no true labels.
Truth = Callable[[np.ndarray, torch.Tensor], int]
#: The column of a training sample whose label its client does not know.
UNKNOWN = -1


class NodeData:
    """The samples of the clients of one node.

    Args:
        holdings: [task] -> the indices of each client's training samples.
        columns: (n,) int64, the class of each sample as a column of the label matrix, `UNKNOWN` where its client does
            not know it: true labels of unlabelled samples are never here.
        inputs: (n, ...) the samples; they are moved to the device once, since a copy in each turn would cost more than
            the computation on it.
        numbers: (n,) int64, the index of each sample in the whole data set; None: these are the whole data set.
    """

    def __init__(
        self,
        context: Context,
        holdings: Sequence[Sequence[np.ndarray]],
        columns: np.ndarray,
        inputs: torch.Tensor,
        numbers: np.ndarray | None = None,
    ) -> None:
        self._context = context
        self.holdings = [Holdings.of(clients) for clients in holdings]
        self._known = columns != UNKNOWN
        self._inputs = inputs.to(context.device)
        self._labels = torch.from_numpy(columns).to(context.device)
        self._numbers = numbers
        #: The last task asked for, and the indices of all clients' samples of it on the device.
        self._dealt: tuple[int, torch.Tensor] | None = None

    @property
    def clients(self) -> int:
        """K."""
        return len(self.holdings[0])

    def counts(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        """(K,) and (K,): how many samples of a task each client has, and how many of them are labelled."""
        return self.holdings[task].sizes(), self.holdings[task].chosen(self._known)

    @property
    def raw(self) -> RawSamples:
        """The cost of sending a sample as it is."""
        return RawSamples.of(self._inputs, self._context.wire)

    @property
    def numbers_per_sample(self) -> int:
        """How many numbers one sample has."""
        return self._inputs.shape[1:].numel()

    def samples(self, task: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of a client's labelled samples of a task, and of its unlabelled ones."""
        held = self.holdings[task]
        indices = held.indices[held.ends[client] : held.ends[client + 1]]
        known = self._known[indices]
        return (indices, indices[:0]) if known.all() else (indices[known], indices[~known])

    def client_data(self, task: int, client: int) -> ClientData:
        """A client's samples of a task."""
        known, unknown = self.samples(task, client)
        held = self.holdings[task]
        # All clients' indices are copied at once: a task has many rounds, and a copy in each turn costs more.
        if self._dealt is None or self._dealt[0] != task:
            self._dealt = task, torch.from_numpy(held.indices).to(self._context.device)
        chosen = self._dealt[1][held.ends[client] : held.ends[client + 1]]
        if len(unknown):
            chosen = torch.from_numpy(known).to(self._context.device)
        labels = self._labels.index_select(0, chosen)
        inputs = of_context(self._inputs.index_select(0, chosen), self._context)
        # Most clients know all their labels: no rows are taken without a look at indices.
        unlabelled = self.inputs(unknown) if len(unknown) else inputs[:0]
        return ClientData(client, task, inputs, labels, unlabelled)

    def inputs(self, indices: np.ndarray) -> torch.Tensor:
        """Samples on the device."""
        return on_device(self._inputs, indices, self._context)

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """The indices that samples have in the whole data set."""
        return indices if self._numbers is None else self._numbers[indices]


def on_device(samples: torch.Tensor, indices: np.ndarray, context: Context) -> torch.Tensor:
    """Selected samples on the device: images as they are, features in the statistics' type."""
    return of_context(samples.index_select(0, torch.from_numpy(indices).to(samples.device)), context)


def of_context(samples: torch.Tensor, context: Context) -> torch.Tensor:
    """Images as they are, features in the statistics' type."""
    return samples if samples.dtype == torch.uint8 else samples.to(context.device, context.dtype)


class Node:
    """Runs the turns of the clients that live in one process, and keeps their states.

    Args:
        truth: counts right guesses outside the turns; None: the true labels are unknown.
    """

    def __init__(
        self,
        client: Client,
        context: Context,
        data: NodeData,
        middleware: Middleware,
        uploads: Uploads,
        truth: Truth | None = None,
    ) -> None:
        self.data = data
        self.client = client
        self._context = context
        self._middleware = middleware
        self._uploads = uploads
        self._truth = truth
        self._states: dict[int, State] = {}
        #: Per client whose upload may still be refused, its state before the turn; None: it had none.
        self._before: dict[int, State | None] = {}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A block that computes as the problem says; a process of clients does turns in it, as the server's runs do."""
        context = self._context
        with environment.computing(context.threads), environment.choosing_kernels(context.cudnn):
            yield

    def commit(self) -> None:
        """Called when all uploads so far have been absorbed or refused."""
        self._before.clear()

    def train_batched(self, shards: Sequence[ClientData], broadcast: Message) -> str | None:
        """Have clients train side by side before their turns; returns why they don't (see `Client`)."""
        # A broadcast is the same for all clients.
        received = self._middleware.receive(broadcast, shards[0].client)
        states = [self.keeps(client_data.client) for client_data in shards]
        return self.client.train_batched(shards, received, states)

    def turn(self, client: int, broadcast: Message, client_data: ClientData | None = None) -> Reply:
        """One client's turn in the broadcast's task and round. Only the client's state remains here afterwards."""
        task, round_ = broadcast.task, broadcast.round
        client_data = self.data.client_data(task, client) if client_data is None else client_data
        state = self._states.get(client, {})
        watch = Stopwatch(self._context.device)
        with watch.running():
            received = self._middleware.receive(broadcast, client)
            guesses = self.client.pseudo_labels(client_data)
            if guesses is not None:
                client_data = client_data.with_pseudo_labels(guesses)
            made, state = turn_of(
                self.client,
                self.client.update(client_data, received, state),
                self._uploads,
                received.stage,
                len(client_data.labels),
            )
            try:
                upload = self._middleware.send(made.to_be_sent(received.stage, task, round_), client)
            except FloatingPointError as error:
                raise UserError(
                    f"client {client}, task {task}, round {round_} ({received.stage}): {error}",
                    f"finite numbers from {type(self.client).__name__}.update",
                ) from error
        alone, grouped = self._leakage(made, received.stage, client_data, guesses)
        # Copies: what a client keeps of the network that all clients share would change with the next training.
        kept = {name: value.clone() for name, value in state.items()}
        self._before[client] = self._states.get(client)
        self._states[client] = kept
        accepted, right = (0, 0) if guesses is None else self._counted(task, client, guesses)
        sizes = stored_bytes(kept), samples_in(kept)
        return Reply(
            client, upload, watch.seconds, guesses, *sizes, alone, accepted, right, grouped, counts=watch.counts
        )

    def _leakage(
        self, made: Message, stage: str, client_data: ClientData, guesses: torch.Tensor | None
    ) -> tuple[Leakage | None, Grouped | None]:
        """What an upload reveals of single samples; and, where uploads are added up, what decides it for the sum."""
        if not self._uploads.leak:
            return None, None
        from fcl_bench.engine.single_sample_leakage import Grouped, revealed

        groups, client = self._uploads.groups(made, stage, client_data.labels), client_data.client
        grouped = Grouped.of(groups, np.arange(len(client_data.labels)))
        alone = revealed({client: grouped})[client]
        if not len(alone.samples) and not self._context.sums:
            return alone, None
        numbers = self._learnt_from(client_data.task, client, guesses)
        alone = dataclasses.replace(alone, samples=numbers[alone.samples])
        return alone, dataclasses.replace(grouped, samples=numbers) if self._context.sums else None

    def _learnt_from(self, task: int, client: int, guesses: torch.Tensor | None) -> np.ndarray:
        """The indices in the data set of the samples that a client learnt from, in the order of its shard."""
        learnt, unlabelled = self.data.samples(task, client)
        if guesses is not None:
            learnt = np.concatenate([learnt, unlabelled[(guesses >= 0).cpu().numpy()]])
        return self.data.numbers(learnt)

    def _counted(self, task: int, client: int, guesses: torch.Tensor) -> tuple[int, int | None]:
        """How many samples a client labelled itself, and how many of these labels are right."""
        _, unlabelled = self.data.samples(task, client)
        right = None if self._truth is None else self._truth(self.data.numbers(unlabelled), guesses)
        return int((guesses >= 0).sum()), right

    def answer(self, client: int, request: Message) -> Reply:
        """The answer of a client's middleware to a request; the method is not asked, and no state changes.

        Raises:
            ValueError: no middleware knows this kind of request.
        """
        watch = Stopwatch(self._context.device)
        with watch.running():
            answer = self._middleware.answer(client, request)
        if answer is None:
            raise ValueError(f"no middleware of this side answers to {request.stage!r}")
        return Reply(client, answer, watch.seconds, None, {}, 0)

    def rollback(self, client: int) -> None:
        """The upload of a turn since `commit` was left out: restore the client's state from before that turn."""
        if client not in self._before:
            raise ValueError(f"client {client} has had no turn that could be taken back")
        state = self._before.pop(client)
        if state is None:
            del self._states[client]
        else:
            self._states[client] = state

    def keeps(self, client: int) -> State:
        """The state of one client."""
        return self._states.get(client, {})

    def resume(self, client: int, state: State) -> None:
        """Let one client continue from a saved state."""
        self._states[client] = {name: value.to(self._context.device) for name, value in state.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the clients keep: `<client>.<name>`."""
        return {f"{client}.{name}": value for client, state in self._states.items() for name, value in state.items()}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self._states, self._before = {}, {}
        for key, value in states.items():
            client, _, name = key.partition(".")
            self._states.setdefault(int(client), {})[name] = value.to(self._context.device)


def stored_bytes(state: State) -> dict[str, int]:
    """Bytes of a client's state by kind (the part of a name before its first dot)."""
    found: dict[str, int] = {}
    for name, value in state.items():
        kind = name.partition(".")[0]
        found[kind] = found.get(kind, 0) + value.nbytes
    return found


def samples_in(state: State) -> int:
    """How many rows of raw samples a client's state holds."""
    return sum(len(value) for name, value in state.items() if name.partition(".")[0] in SAMPLE_KINDS)


def turn_of(half: Client, returned: Any, uploads: Uploads, stage: str, samples: int) -> tuple[Message, State]:
    """The upload and the new state that a client half returned.

    Raises:
        UserError: `returned` is not a message and a mapping of tensors, a tensor of the message is not declared, or the
            message groups other samples.
    """
    where = f"{type(half).__name__}.update"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(f"{where} returned {kind_of(returned)}", "the upload and the new state: return message, state")
    made, state = returned
    require_message(where, made)
    if unknown := [name for name in made if uploads.field(stage, name) is None]:
        fields = ", ".join(uploads.declared.get(stage, {})) or "none"
        raise UserError(
            f"{where} sent {unknown[0]}, which `uploads` of the method does not declare", f"{stage}: {fields}"
        )
    for name, which in made.groups.items():
        _require_groups(f"{where}: groups", name, which, samples)
    require_tensors(f"{where}: the state", state)
    return made, state


def _require_groups(where: str, name: str, which: Any, samples: int) -> None:
    """Raise a `UserError` unless `which` says of each sample in which sum it is."""
    if which is None:
        return
    whole = isinstance(which, torch.Tensor) and which.ndim == 1 and not which.is_floating_point()
    if not whole or len(which) < samples:
        raise UserError(
            f"{where}: {name} is {kind_of(which)}",
            f"None, or a whole number for each of the {samples} samples",
        )
