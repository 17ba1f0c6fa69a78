"""The loop over tasks, rounds and clients. It is written once, for every method and every transport."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fcl_bench.data.splits.base import Stream
from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.codec import Codec, Middleware, chained
from fcl_bench.engine.evaluation import Evaluation, Predictions, RoundAccuracy, Tested
from fcl_bench.engine.exchange import Accounting, Exchange, Held, Round, Step, Stopwatch, schema_of
from fcl_bench.engine.gates import Gates, none_yet
from fcl_bench.engine.ledger import Ledger
from fcl_bench.engine.reports import Absences, BatchedTurns, GateState
from fcl_bench.engine.transport import Transport
from fcl_bench.engine.validation import OptionStep, Validation
from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import with_prefix
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import require_message
from fcl_bench.protocol.method import Method, Server
from fcl_bench.tracking.console import Notices, progress

if TYPE_CHECKING:
    from fcl_bench.engine.missing import MissingClients
    from fcl_bench.protocol.audit import Audit, FullData

log = logging.getLogger(__name__)

#: Prefixes of a checkpoint's tensors other than the server's; an audit's prefix is followed by its name.
_AUDIT, CLIENT = "audit.", "client."
_VALIDATION = GROWING + "validation."
#: The fields of a `FederationState` that are JSON already.
_PLAIN = (
    *("tasks_done", "rounds_done", "server_seconds", "client_counts", "server_counts"),
    *("client_storage_bytes", "client_storage_max_bytes", "client_samples_kept"),
    *("absences", "missing", "batched_turns", "gates"),
)


@dataclass
class FederationState:
    """The progress of a run. With the tensors, it is all that a resumed run needs.

    Attributes:
        validation: the same on validation samples; None where there are none beside the test set.
        server_seconds: the server's seconds in those rounds.
        client_counts, server_counts: what all clients, and the server, have computed so far (`protocol.compute`).
        client_storage_bytes: the most that any client has kept between turns so far, by kind.
        missing: client and round of each turn of the current task that brought no upload in time and on which later
            rounds build.
        batched_turns: counts of turns whose training was done together with other clients' (`parallel_clients`).
    """

    tasks_done: int
    answers: Predictions
    validation: Predictions | None
    ledger: Ledger
    rounds_done: int = 0
    server_seconds: float = 0.0
    client_counts: Counter[str] = field(default_factory=Counter)
    server_counts: Counter[str] = field(default_factory=Counter)
    client_storage_bytes: dict[str, int] = field(default_factory=dict)
    client_storage_max_bytes: int = 0
    client_samples_kept: int = 0
    absences: Absences = field(default_factory=lambda: cast("Absences", dict.fromkeys(Absences.__annotations__, 0)))
    missing: list[tuple[int, int]] = field(default_factory=list)
    batched_turns: BatchedTurns = field(
        default_factory=lambda: BatchedTurns(turns_batched=0, turns_single=0, single_because=[])
    )
    gates: GateState = field(default_factory=none_yet)

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The whole state: a little JSON, and tensors that only gain rows with tasks, clients and rounds."""
        saved = {name: getattr(self, name) for name in _PLAIN}
        saved |= {"answers": self.answers.state(), "ledger": self.ledger.state()}
        tensors = {**self.ledger.tensors(), **self.answers.tensors(self.tasks_done)}
        if self.validation is not None:
            own = self.validation.tensors(self.tasks_done)
            tensors |= {_VALIDATION + name.removeprefix(GROWING): tensor for name, tensor in own.items()}
        return saved, tensors

    def restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in _PLAIN:
            setattr(self, name, saved[name])
        self.answers.restore(saved["answers"], tensors)
        if self.validation is not None:
            own = {GROWING + name: tensor for name, tensor in with_prefix(tensors, _VALIDATION).items()}
            self.validation.restore(saved["answers"], own)
        self.ledger.restore(saved["ledger"], tensors)


class Federation:
    """One method on one stream: trains task by task, evaluates after each.

    Args:
        test: (n, ...) the test samples: features, or images in uint8.
        audits: measurements beside the run, by name; only over a transport that sees everything.
        middleware: the server's side middleware, before the wire codec.
        evaluate_rounds: N, to test after every N-th round of the model; 0: only after each task.
        drops: whether a client whose upload is not as the server expects is left out of the round; else the run ends.
        minimum: the least share of a round's clients that must answer over the transport; None: all.
        train: (n, ...) all training samples, the stream's validation samples among them; None: these are not asked
            about.
    """

    def __init__(
        self,
        method: Method,
        context: Context,
        stream: Stream,
        transport: Transport,
        test: torch.Tensor,
        audits: Mapping[str, Audit] | None = None,
        middleware: Sequence[Middleware] = (),
        evaluate_rounds: int = 0,
        drops: bool = False,
        minimum: float | None = None,
        steps: Sequence[OptionStep] = (),
        by_sample: bool = False,
        train: torch.Tensor | None = None,
    ) -> None:
        self.context = context
        self.stream = stream
        self.transport = transport
        self.server = method.server(context)
        self.audits = dict(audits or {})
        if self.audits and transport.everything is None:
            raise UserError(
                f"the audits {', '.join(self.audits)} need the clients' data, which stay where they are",
                "method.bounds=false, method.theory=0 and drift=0",
            )
        tested = {"accuracy": Tested(test, stream.test_columns, stream.test)}
        if train is not None:
            tested["validation"] = Tested(train, stream.train_columns, stream.validation, numbered=False)
        #: By the name of their accuracy in tasks.csv and rounds.csv; the test set's is the first.
        self._evaluations = {name: Evaluation(context, stream.tasks, own) for name, own in tested.items()}
        tasks = len(stream.tasks)
        self.state = FederationState(
            0,
            Predictions(tasks, by_sample),
            Predictions(tasks) if train is not None else None,
            Ledger(transport.clients, transport.raw),
        )
        self.rounds = RoundAccuracy(evaluate_rounds, self._evaluations)
        # Other steps, and sums made by nodes of a tree, get uploads in the statistics' type.
        as_sent = not middleware and not steps
        codec = Codec(Uploads.of(method, context), None, context.dtype, context.device, as_sent)
        self._middleware = chained([*middleware, codec])
        #: (K,) samples that clients have had so far, and over how many tasks.
        self._announced, self._announced_tasks = np.zeros(transport.clients, dtype=np.int64), 0
        self._resumes_within_tasks = method.resumes_within_tasks
        self._watch = Stopwatch(context.device)
        self._missing, self.exchange = self._composed(steps, drops, minimum)

    def _composed(
        self, steps: Sequence[OptionStep], drops: bool, minimum: float | None
    ) -> tuple[MissingClients | None, Exchange]:
        """The steps between the transport and the server, in their order; the first where clients can be missing."""
        server, transport, notices = self.server, self.transport, Notices(log)
        accounting = Accounting(self.state)
        validation = Validation(self._middleware, server, transport, notices, drops)
        made: list[Step] = [accounting, *(step(accounting, validation) for step in steps)]
        missing = None
        if drops or minimum is not None or not transport.complete:
            from fcl_bench.engine.missing import MissingClients

            tasks = self.stream.tasks
            missing = MissingClients(self.state, server, transport, validation, tasks, notices, minimum, drops)
            made.append(missing)
        made.append(validation)
        if self.audits:
            from fcl_bench.engine.observation import Observation

            made.append(Observation(self.audits, transport))
        return missing, Exchange(transport, made)

    def run(self, checkpoint: Callable[[Federation], Any], every: int | None = None) -> FederationState:
        """Run all tasks that are not done yet.

        Args:
            checkpoint: called after each task (to save it, say), and within tasks as `every` says.
            every: number of rounds after which it is called too, if the method can resume from there.
        """
        tasks = self.stream.tasks
        rounds = [self._rounds_in(task) for task in tasks]
        done = sum(rounds[: self.state.tasks_done]) + self.state.rounds_done
        within = every if self._resumes_within_tasks else None
        with progress(sum(rounds), "learning", "task" if sum(rounds) == len(tasks) else "round", done=done) as bar:
            for task in tasks[self.state.tasks_done :]:
                for round_ in self._learn(task):
                    bar.update()
                    if within is not None and round_ % within == 0 and round_ < rounds[task.index]:
                        checkpoint(self)
                self._evaluate(task)
                self.state.tasks_done = task.index + 1
                checkpoint(self)
        return self.state

    def _learn(self, task: Task) -> Iterator[int]:
        """The rounds of one task that are not done yet; yields how many are, after each."""
        state, server, watch = self.state, self.server, self._watch
        watch.seconds, watch.counts = state.server_seconds, Counter(state.server_counts)
        held = self._held(task)
        rounds = self._start(task)
        if state.rounds_done:  # the run was resumed within the task, whose start has been counted
            watch.counts = Counter(state.server_counts)
        gates = Gates(self._evaluations["accuracy"], state.gates)
        gates.begin(task, server)
        for number in range(state.rounds_done, rounds):
            self._round(task, number, held)
            for audit in self.audits.values():
                audit.look(task, number, server)
            if number + 1 < rounds:  # after the last one, once the task is finished
                self.rounds.look(task, number, server)
                gates.look(task, number, server)
            state.rounds_done, state.server_seconds, state.server_counts = number + 1, watch.seconds, watch.counts
            yield number + 1
        with watch.running():
            server.finish_task()
        state.ledger.server_seconds.append(watch.seconds)
        state.server_counts = watch.counts
        state.rounds_done, state.server_seconds, state.missing = 0, 0.0, []

    def _rounds_in(self, task: Task) -> int:
        """How many rounds a task has, as far as is known before it."""
        return self.server.rounds(task)

    def _start(self, task: Task) -> int:
        """Start a task; returns how many rounds it has."""
        with self._watch.running():
            self.server.start_task(task)
            return self.server.rounds(task)

    def _round(self, task: Task, number: int, held: Held) -> None:
        """One round: broadcast, the clients' turns one by one, and what the server makes of their uploads."""
        server, watch = self.server, self._watch
        round_ = self._asked(task, number, held)
        for client, upload in self.exchange.uploads(round_):  # counted, validated, in order
            with watch.running():
                server.absorb(client, upload)
            del upload
        self.state.ledger.add_round(task.index, number, round_.broadcast.stage, round_.columns)
        with watch.running():
            server.finish_round()

    def _asked(self, task: Task, number: int, held: Held) -> Round:
        """A round as its clients are asked for it."""
        server, watch = self.server, self._watch
        with watch.running():
            present = self._participants(task, number, held.labelled)
            broadcast = server.broadcast(task, number)
            require_message(f"{type(server).__name__}.broadcast", broadcast)
            broadcast = replace(broadcast, task=task.index, round=number)
            schema = schema_of(server, task, broadcast.stage)
            broadcast = self._middleware.send(broadcast, None)
        return Round(task, number, present, broadcast, schema, held, watch)

    def _participants(self, task: Task, number: int, labelled: np.ndarray) -> list[int]:
        """The clients that the server names for a round, without those whose missing upload it would build on."""
        barred = self._missing.barred(task, number) if self._missing else set()
        available = [k for k in np.flatnonzero(labelled).tolist() if k not in barred]
        named = self.server.participants(task, number, available)
        return [k for k in participants_of(self.server, named, self.transport.clients) if k not in barred]

    def _evaluate(self, task: Task) -> None:
        """Test the server, and let the audits report."""
        answers = {"accuracy": self.state.answers}
        if self.state.validation is not None:
            answers["validation"] = self.state.validation
        for name, evaluation in self._evaluations.items():
            evaluation.take(task, self.server, answers[name])
        self.rounds.finish(task, self.server.rounds(task) - 1, answers)
        self._look_for_gates(task)
        for audit in self.audits.values():
            audit.report(task, self.server, self._everything(task))

    def _look_for_gates(self, task: Task) -> None:
        Gates(self._evaluations["accuracy"], self.state.gates).finish(task, self.server, self.state.answers)

    def _held(self, task: Task) -> Held:
        """How many samples the clients hold in a task and have held so far."""
        samples, labelled = self.transport.samples(task.index)
        if self._announced_tasks != task.index:  # in a resumed run
            before = [self.transport.samples(index)[0] for index in range(task.index)]
            self._announced = np.sum([np.zeros(self.transport.clients, dtype=np.int64), *before], axis=0)
        self._announced, self._announced_tasks = self._announced + samples, task.index + 1
        return Held(samples, labelled, self._announced)

    def _everything(self, task: Task) -> FullData:
        """What audits look at after a task."""
        from fcl_bench.protocol.audit import FullData

        exam, data = self._evaluations["accuracy"], self.transport.everything
        assert data is not None
        return FullData(lambda: map(exam.inputs, exam.batches(task, self.server.pure_batches)), data.inputs)

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Everything that a resumed run needs, as JSON and tensors.

        Tensors whose names start with `GROWING` only gain rows from one call to the next. No tensor is a copy.
        """
        state, growing = self.state.save()
        of_steps, rows_of_steps = self.exchange.save()
        tensors = {**self.server.state_dict(), **self.rounds.tensors()}
        for name, audit in self.audits.items():
            tensors |= {f"{_AUDIT}{name}.{key}": tensor for key, tensor in audit.state_dict().items()}
        tensors |= {CLIENT + key: tensor for key, tensor in self.transport.state_dict().items()}
        rows = {name: audit.rows for name, audit in self.audits.items()}
        return {**state, **of_steps, "audits": rows}, {**tensors, **growing, **rows_of_steps}

    def restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.state.restore(saved, tensors)
        self.exchange.restore(saved, tensors)
        prefixes = [*(f"{_AUDIT}{name}." for name in self.audits), CLIENT, GROWING, ""]
        parts: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in prefixes}
        for name, tensor in tensors.items():
            prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
            parts[prefix][name.removeprefix(prefix)] = tensor
        self.rounds.restore(tensors)
        self.server.load_state_dict(parts[""])
        self.transport.load_state_dict(parts[CLIENT])
        for name, audit in self.audits.items():
            audit.rows = saved["audits"][name]
            audit.load_state_dict(parts[f"{_AUDIT}{name}."])


def participants_of(server: Server, named: Iterable[int], clients: int) -> list[int]:
    """The clients that the server named for a round, among them perhaps others than those that were available.

    Raises:
        UserError: one of them is no client of the run, or is named twice.
    """
    present = [int(client) for client in named]
    if present and (min(present) < 0 or max(present) >= clients or len(set(present)) < len(present)):
        raise UserError(
            f"{type(server).__name__}.participants named the clients {', '.join(map(str, present[:20]))}",
            f"some of 0 to {clients - 1}, each once",
        )
    return present
