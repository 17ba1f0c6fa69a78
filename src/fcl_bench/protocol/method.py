"""The one interface: a method is a client half and a server half with one message type between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fcl_bench.errors import UserError
from fcl_bench.protocol.context import ClientData, Context, Prediction, State, Task, TestBatch
from fcl_bench.protocol.fields import Field, Schema, Uploads, like
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.state import restore, saved

if TYPE_CHECKING:
    from fcl_bench.protocol.audit import Audit
    from fcl_bench.protocol.combining import Combination

#: Stands for the client of an upload that is the sum of all clients' uploads.
EVERYONE = -1


@dataclass(frozen=True)
class Picture:
    """Images that a server made or reconstructed, to be looked at.

    Attributes:
        images: (n, 3, h, w) uint8.
        labels: (n,) the column of the class that each image stands for.
        tasks: (n,) the task of each image, ascending.
    """

    images: torch.Tensor
    labels: torch.Tensor
    tasks: torch.Tensor


class Client(ABC):
    """The client half. It sees its own shard, its own state and what the server broadcast, nothing else.

    One object serves many clients, one after the other: what a client keeps between its turns goes through `state`.
    """

    def pseudo_labels(self, client_data: ClientData) -> torch.Tensor | None:
        """Labels (m,) that the client gives its unlabelled samples, -1 for none; None: it uses none of them.

        The engine calls this once per round and counts its time as the client's.
        """
        return None

    def train_batched(self, shards: Sequence[ClientData], broadcast: Message, states: Sequence[State]) -> str | None:
        """Do the costly part of several clients' updates together; their updates follow, and take over what was done.

        The engine calls it with `parallel_clients` above 1, and counts its time as these clients'.

        Args:
            shards, states: of each client, as of `update`.

        Returns:
            "", or in a few words why nothing was done; the clients then compute one after the other. None: in this
            stage there is nothing to do ahead.
        """
        return "the method trains no linear heads by SGD"

    @abstractmethod
    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """The upload of one client for one round, and what it keeps.

        Args:
            broadcast: what the server sent for this round; `broadcast.stage` says what is asked for.
            state: what the client returned in its last turn, not to be changed in place; empty in its first.
        """


class Server(ABC):
    """The server half. It sees uploads, nothing else, and keeps none of them.

    The engine calls, per task: `start_task`; then `rounds` times `participants`, `broadcast`, `absorb` for each of them
    in their order, and `finish_round`; then `finish_task`. `classify` is valid after each `finish_task`, and within a
    task after its `model_rounds`.

    Attributes:
        method, context: what it was made of.
        state: names of the attributes that a resumed run needs (see `protocol.state`), in this class; those of its base
            classes are saved, too.
        pure_batches: None: test samples are classified one by one, independently of the others in their batch. A
            number: they are classified in batches of this size that are known to be of one task. This tells the method
            more than a task-agnostic test does, so the results say so.
    """

    method: Any
    context: Context
    state: ClassVar[Sequence[str]] = ()
    pure_batches: int | None = None

    @abstractmethod
    def start_task(self, task: Task) -> None:
        """Make room for the task's classes; a run that resumes inside the task calls it again, after `restored`."""

    def rounds(self, task: Task) -> int:
        """Rounds of exchange in this task; 1 for the closed-form methods."""
        return 1

    def model_rounds(self, task: Task) -> Sequence[int]:
        """The rounds of the task, ascending, after which `classify` is valid too: those that train a model."""
        return ()

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        """Which clients take part in a round, in order of their turns.

        Args:
            available: the clients that hold labelled samples of the task. A server may name others that it knows to
                keep something of earlier tasks; these get a shard without labelled samples.
        """
        return available

    def may_return(self, task: Task, refused: int, round_: int) -> bool:
        """Whether a client whose upload of the task's round `refused` was left out may take part in a later round.

        It may not if the later round builds on the earlier one's uploads, as statistics build on a registration.
        """
        return False

    @abstractmethod
    def broadcast(self, task: Task, round_: int) -> Message:
        """What every client receives at the start of a round."""

    def schema(self, task: Task, stage: str) -> Schema:
        """The fields of an upload of the round at hand; one that differs is refused before `absorb`.

        What `Method.uploads` declares for the stage, with the lengths of this task. A server narrows it by what only
        its state knows.
        """
        sizes = {"c": len(task.columns)}
        found: dict[str, Field] = {}
        for name, field in self._declared[stage].items():
            found |= like(self.matching(name), field) if name.endswith("*") else {name: field.sized(sizes)}
        return found

    @cached_property
    def _declared(self) -> Mapping[str, Schema]:
        """What the method declares, with the lengths that are the same in every task."""
        sizes = self.method.sizes(self.context)
        return {
            stage: {name: field.sized(sizes) for name, field in fields.items()}
            for stage, fields in self.method.uploads(self.context).items()
        }

    def matching(self, name: str) -> Mapping[str, torch.Tensor]:
        """The tensors that a declared name with "*" stands for in the round at hand, of the shapes of an upload's."""
        raise TypeError(f"{type(self).__name__} does not say which tensors {name} stands for")

    def objection(self, upload: Message) -> str:
        """How the fields of an upload, each as expected, contradict each other; "" where they do not."""
        return ""

    @abstractmethod
    def absorb(self, client: int, upload: Message) -> None:
        """Take in one upload, already in the statistics' dtype on the device.

        For a method with a `combination`, the upload may be a combination of several (`upload.clients`); `client` is
        then the first of them.
        With `Context.sums` it is the sum of all uploads of the round, and `client` is `EVERYONE`.
        """

    def finish_round(self) -> None:  # noqa: B027
        """Called when all uploads of the round are in."""

    def await_late(self, task: Task) -> None:  # noqa: B027
        """An upload of the current round will come later: keep whatever is needed to absorb it then."""

    def lose_late(self, task: Task) -> None:  # noqa: B027
        """One of the uploads that `await_late` announced has arrived and was refused."""

    def late_stage(self, task: Task, round_: int) -> str | None:
        """The stage of an upload of an earlier task or round that arrives now; None: it is no longer of use."""
        return None

    def absorb_late(self, client: int, upload: Message, task: Task) -> None:
        """Take in an upload of an earlier task, as expected; `classify` is valid after the next `finish_task`."""
        raise TypeError(f"{type(self).__name__} absorbs no late uploads")

    @abstractmethod
    def finish_task(self) -> None:
        """All rounds of the task are over; bring the classifier up to date."""

    @abstractmethod
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Class scores (n, C_t) over the classes seen so far, of `inputs` (n, d)."""

    def classify(self, batch: TestBatch) -> Prediction:
        """Scores of test samples and, from a method that tells tasks apart, the task of each."""
        return Prediction(self.predict(batch.inputs))

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Features (n, d) from the current backbone; with a frozen backbone they are the inputs."""
        return inputs

    @abstractmethod
    def model(self) -> dict[str, torch.Tensor]:
        """The tensors that prediction needs: the classifier `W` (M, C) and whatever comes before it."""

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        """Classify like the server whose `model` this is. Only for a server before its first task; it learns no more.

        Args:
            model: what `model` returned, on the device.
            tasks: all tasks that the saved server had learnt.

        Raises:
            UserError: the server half has no such method.
        """
        raise UserError(f"{type(self).__name__} takes up no saved model", "a server half that has load_model")

    def report(self) -> dict[str, Any]:
        """The method's own entries in the run record, as JSON (run.json: `report`)."""
        return {}

    def watched(self) -> Mapping[str, torch.Tensor]:
        """Tensors whose size stays of one order in a sound run (weights, running statistics, drift), by name."""
        return {}

    def gates(self) -> Mapping[str, str]:
        """Signs after a task that the run is no fair sample of the method, each in words; the usual one is `idle_term`:
        a term that is clipped, or zero, nearly everywhere.
        """
        return {}

    def pictures(self) -> dict[str, Picture]:
        """Images to be drawn in the run's folder, by file name."""
        return {}

    def privacy(self) -> dict[str, int]:
        """Counts of what the server made or learnt of samples: run.json's `privacy`; missing keys count as 0."""
        return {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything a resumed run needs after `finish_task`: the attributes that `state` names."""
        return saved(self, self._state_names())

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""
        restore(self, self._state_names(), state, self.context.device)
        self.restored()

    def restored(self) -> None:  # noqa: B027
        """Called when the state was loaded: make again what follows from it."""

    def _state_names(self) -> list[str]:
        return list(dict.fromkeys(name for own in reversed(type(self).__mro__) for name in vars(own).get("state", ())))


class Method(ABC):
    """What `method=...` names: a dataclass of the method's knobs that makes both halves.

    Attributes:
        revision: to be raised when a change to the method changes its numbers; part of the run id, so that runs of the
            old code are not taken for runs of the new.
        ignores_partition: whether its model follows from the samples of all clients, to rounding, whoever holds which.
        resumes_within_tasks: whether its server's state is whole after every round, not only after a task.
        common_tasks: whether it needs tasks that all clients learn at the same time.
        search: the few knobs of the class that matter most, each with the range in which `fcl-bench tune` tries it,
            beside those of its base classes; "" takes a base class's knob out.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1
    ignores_partition: bool = False
    resumes_within_tasks: ClassVar[bool] = False
    common_tasks: ClassVar[bool] = False
    search: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def search_space(cls) -> dict[str, str]:
        """The knobs that a search tries, and their ranges: what the class and its base classes declare."""
        found = {key: values for base in reversed(cls.__mro__) for key, values in vars(base).get("search", {}).items()}
        return {key: values for key, values in found.items() if values}

    @property
    def trains_network(self) -> bool:
        """Whether it trains the backbone itself, on images, instead of using a frozen backbone's features."""
        return False

    @abstractmethod
    def uploads(self, context: Context) -> Mapping[str, Schema]:
        """The fields of its uploads, by stage: the one place that says what they are.

        Both halves, the wire, secure sums, trees, noise, and the counts of what uploads reveal follow it. With
        `Context.sums` clients send only fields that are SUM, MEAN or OPEN.
        """

    def sizes(self, context: Context) -> Mapping[str, int]:
        """The lengths that names of sides stand for in every task; "c" is the number of classes of the task."""
        return {"d": context.inputs}

    @property
    def weighting(self) -> str:
        """How the mean of MEAN fields weighs clients: "samples" or "uniform"."""
        return "samples"

    def contents(self) -> Mapping[str, str]:
        """By knobs that name a file, a hash of what it holds, which takes the path's place in the run's id."""
        return {}

    def check(self, context: Context, classes_per_task: list[int]) -> None:  # noqa: B027
        """Raise a `UserError` for knobs that this problem rules out, before any work is done."""

    def small(self, context: Context, samples: int) -> bool:
        """Whether a run with this many training samples gains nothing from a second thread of the CPU.

        What counts are the sizes, since sums round by the number of threads: the same command gives the same bits.
        """
        return False

    def audits(self, context: Context) -> Mapping[str, Audit]:
        """The audits that the method's knobs ask for, new, by the name of their table: "bounds" is bounds.csv."""
        return {}

    def paper_bytes(self, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
        """One client's uploads in MiB as papers' tables count them; empty for a method that is in none of them.

        `fedran_mib` (FedRAN's Table 4): one task's upload in float64 with label columns for all classes of the stream.
        `stsa_mib` (STSA's Table 5): the uploads of all tasks in float32, with c_t columns for a task of c_t classes.
        """
        return {}

    def combination(self, context: Context) -> Combination | None:
        """How a node of a tree makes one upload of several (see `protocol.combining`); None: it cannot."""
        from fcl_bench.protocol.combining import as_declared

        return as_declared(Uploads.of(self, context), self.weighting)

    @abstractmethod
    def client(self, context: Context) -> Client:
        """The client half."""

    @abstractmethod
    def server(self, context: Context) -> Server:
        """The server half, before its first task."""
