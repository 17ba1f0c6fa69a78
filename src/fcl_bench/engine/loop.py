"""The loop over tasks, rounds and clients. It is written once, for every method and every transport."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from fcl_bench.data.splits.stream import Stream
from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.codec import Codec
from fcl_bench.engine.contract import broadcast_of, participants_of, schema_of
from fcl_bench.engine.evaluation import Evaluation, Predictions
from fcl_bench.engine.ledger import NOBODY_KNOWS, Ledger, Stopwatch
from fcl_bench.engine.middleware import Chain, Middleware
from fcl_bench.engine.missing import SIMULATED, MissingClients
from fcl_bench.engine.node import Late, Lost, Masked, Reply, Total
from fcl_bench.engine.rounds import RoundAccuracy
from fcl_bench.engine.single_sample_leakage import Grouped, Leakage, revealed_together
from fcl_bench.engine.state import FederationState
from fcl_bench.engine.transport import Transport
from fcl_bench.engine.validation import BadUpload, validate_upload
from fcl_bench.errors import UserError
from fcl_bench.options.tree.tree import Arrival, Tree
from fcl_bench.protocol.audit import Audit, FullData
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import SampleCounts, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import EVERYONE, Method
from fcl_bench.protocol.task import Task
from fcl_bench.protocol.uploads import Uploads
from fcl_bench.tracking.console import Notices, progress

log = logging.getLogger(__name__)

#: Prefixes of a checkpoint's tensors other than the server's; an audit's prefix is followed by its name.
_AUDIT, CLIENT = "audit.", "client."


class Federation:
    """One method on one stream: trains task by task, evaluates after each.

    Args:
        method: the method's knobs.
        context: dimensions, types, device, seed.
        stream: the data cut into tasks.
        transport: how the clients are reached.
        test: (n, ...) the test samples: features, or images in uint8.
        audits: measurements beside the run, by name; only over a transport that sees everything.
        middleware: the server's side middleware, before the wire codec.
        evaluate_rounds: N, to test after every N-th round of the model; 0: only after each task.
        drops: whether a client whose upload is not as the server expects is left out of the round; else the run ends.
        minimum: the least share of a round's clients that must answer over the transport; None: all.
        fan_in: the fan-in of a tree of aggregators between the clients and the server, for a method with a
            `combination`; None: the server absorbs the clients' own uploads.
        by_sample: whether the predicted class of every single test sample is kept.
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
        fan_in: int | None = None,
        by_sample: bool = False,
    ) -> None:
        self.context = context
        self.stream = stream
        self.transport = transport
        self.server = method.server(context)
        self.audits = dict(audits or {})
        self.state = FederationState(
            0, Predictions(len(stream.tasks), by_sample), Ledger(transport.clients, transport.raw)
        )
        self._examination = Evaluation(context, stream, test)
        self.rounds = RoundAccuracy(evaluate_rounds, self._examination, np.array([len(own) for own in stream.test]))
        # Other steps, and sums made by nodes of a tree, get uploads in the statistics' type.
        as_sent = not middleware and fan_in is None
        self._uploads = Uploads.of(method, context)
        self._middleware = Chain([*middleware, Codec.of_server(self._uploads, context, as_sent)])
        #: (K,) samples that clients have had so far, and over how many tasks.
        self._announced, self._announced_tasks = np.zeros(transport.clients, dtype=np.int64), 0
        self._resumes_within_tasks = method.resumes_within_tasks
        self._drops = drops
        self.tree = None if fan_in is None else self._tree(method, fan_in)
        self._notices = Notices(log)
        self._missing = MissingClients(self.state, self.server, self._notices, minimum, drops)
        self._after_round: Callable[[int, int], None] = lambda round_, of: None
        if self.audits and transport.everything is None:
            raise UserError(
                f"the audits {', '.join(self.audits)} need the clients' data, which stay where they are",
                "method.bounds=false, method.theory=0 and drift=0",
            )

    def _tree(self, method: Method, fan_in: int) -> Tree:
        combination, context = method.combination(self.context), self.context
        if combination is None:
            raise ValueError(f"{method.name} has uploads that cannot be combined")
        return Tree(
            self.transport.clients, fan_in, combination, Codec.of_clients(self._uploads, context), context.device
        )

    def run(self, checkpoint: Callable[[Federation], Any], every: int | None = None) -> FederationState:
        """Run all tasks that are not done yet.

        Args:
            checkpoint: called after each task (to save it, say), and within tasks as `every` says.
            every: number of rounds after which it is called too, if the method can resume from there.
        """
        tasks = self.stream.tasks
        rounds = [self.server.rounds(task) for task in tasks]
        done = sum(rounds[: self.state.tasks_done]) + self.state.rounds_done
        within = every if self._resumes_within_tasks else None

        def after_round(round_: int, of: int) -> None:
            bar.update()
            if within is not None and round_ % within == 0 and round_ < of:
                checkpoint(self)

        unit = "task" if sum(rounds) == len(tasks) else "round"
        with progress(sum(rounds), "learning", unit, done=done) as bar:
            self._after_round = after_round
            for task in tasks[self.state.tasks_done :]:
                self._learn(task)
                self._examination.take(task, self.server, self.state.answers)
                self.rounds.finish(task, self.server.rounds(task) - 1, self.state.answers)
                for audit in self.audits.values():
                    audit.report(task, self.server, self._everything(task))
                self.state.tasks_done = task.index + 1
                checkpoint(self)
        return self.state

    def _learn(self, task: Task) -> None:
        """The rounds of one task that are not done yet."""
        state, server = self.state, self.server
        watch = Stopwatch(self.context.device, state.server_seconds)
        samples, labelled = self.transport.samples(task.index)
        self._announce(task, samples)
        available = np.flatnonzero(labelled).tolist()
        with watch.running():
            server.start_task(task)
            rounds = server.rounds(task)
        for round_ in range(state.rounds_done, rounds):
            with watch.running():
                barred = self._missing.barred(task, round_)
                named = server.participants(task, round_, [k for k in available if k not in barred])
                present = [k for k in participants_of(server, named, self.transport.clients) if k not in barred]
                broadcast = replace(broadcast_of(server, task, round_), task=task.index, round=round_)
                broadcast = self._middleware.send(broadcast, None)
            self._round(task, round_, present, broadcast, watch, {"samples": samples, "labelled": labelled})
            with watch.running():
                server.finish_round()
            for audit in self.audits.values():
                audit.look(task, round_, server)
            if round_ + 1 < rounds:  # after the last one, once the task is finished
                self.rounds.look(task, round_, server)
            state.rounds_done, state.server_seconds = round_ + 1, watch.seconds
            self._after_round(round_ + 1, rounds)
        with watch.running():
            server.finish_task()
        state.ledger.server_seconds.append(watch.seconds)
        state.rounds_done, state.server_seconds, state.missing = 0, 0.0, []

    def _round(
        self,
        task: Task,
        round_: int,
        present: list[int],
        broadcast: Message,
        watch: Stopwatch,
        known: dict[str, np.ndarray],
    ) -> None:
        """Run the turns of the clients present; nothing is sent to or from the others, and their rows say so.

        Args:
            known: (K,) `samples` and `labelled` samples of each client.
        """
        ledger, clients = self.state.ledger, self.transport.clients
        revealed, failed = ("one_sample_sums", "one_sample_moments"), ("dropped", "lost", "late")
        counted = ("accepted", "right", "up_bytes", "down_bytes", *revealed, *failed)
        columns: dict[str, np.ndarray] = {name: np.zeros(clients, dtype=np.int64) for name in counted}
        columns |= {"client": np.arange(clients), "client_seconds": np.zeros(clients), **known}
        with watch.running():
            expected = schema_of(self.server, task, broadcast.stage)
        absorbed: set[int] = set()
        gone = 0
        #: For clients whose uploads are masked, which sums their samples are in.
        hidden: dict[int, Grouped] = {}
        # No part of an upload is kept beyond its turn.
        for answer in self._answers(present, broadcast, expected, watch):
            if isinstance(answer, Lost):
                gone += answer.reason not in SIMULATED
                self._missing.lost(answer, task, round_, gone, len(present))
                columns["lost"][answer.client] = 1
                continue
            if isinstance(answer, Total):
                with watch.running():
                    self._absorb_total(answer, expected, known["samples"])
                watch.seconds += answer.server_seconds
                for name in ("up_bytes", "down_bytes", "client_seconds"):
                    columns[name] += getattr(answer, name)
                for client, alone in revealed_together(hidden).items():
                    self._note_revealed(client, alone, columns)
                continue
            reply = answer.reply if isinstance(answer, Late | Masked) else answer
            client = reply.client
            if (reply.upload.task, reply.upload.round) != (task.index, round_):
                with watch.running():
                    self._absorb_late(client, reply.upload)
                continue
            columns["up_bytes"][client] = reply.upload.nbytes
            columns["down_bytes"][client] = ledger.send(client, broadcast)
            if self.tree is not None:
                self.tree.received(client, broadcast)
            columns["client_seconds"][client] = reply.seconds
            self.state.note_turn(reply)
            masked = isinstance(answer, Masked)
            if masked and reply.grouped is not None:
                hidden[client] = reply.grouped
            elif not masked:
                self._note_revealed(client, reply.revealed, columns)
            if isinstance(answer, Late):
                self._missing.note("late", client, task, round_)
                columns["late"][client] = 1
                if not self.context.sums:
                    self.server.await_late(task)
            elif masked:
                absorbed.add(client)
            else:
                with (watch if self.tree is None else self.tree.watch(client, watch)).running():
                    taken = self._taken_in(client, reply.upload, expected, int(known["samples"][client]))
                if not taken:
                    self.transport.refused(client)
                    columns["dropped"][client] = 1
                    continue
                absorbed.add(client)
            self.state.note_stored(reply)
            columns["accepted"][client] = reply.accepted
            columns["right"][client] = NOBODY_KNOWS if reply.right is None else reply.right
            if round_ == 0 and known["labelled"][client] and client in absorbed:
                self._observe(task, client, reply.guesses)
            del answer, reply
        if round_ == 0:
            for client in sorted(set(np.flatnonzero(known["labelled"]).tolist()) - absorbed):
                self._observe(task, client)
        ledger.add_round(task.index, round_, broadcast.stage, columns)
        if self.tree is not None:
            self.tree.finish(task.index, round_)

    def _answers(
        self, present: list[int], broadcast: Message, expected: Schema, watch: Stopwatch
    ) -> Iterator[Reply | Lost | Late | Masked | Total]:
        """The transport's answers; with a tree, each answer is handled, then the server absorbs what it completes."""
        if self.tree is None:
            yield from self.transport.exchange(present, broadcast)
            return

        def admit(arrival: Arrival) -> Message:
            return validate_upload(
                *(arrival.client, arrival.upload, self._middleware, self.server, expected, self.context),
                *(arrival.announced, arrival.clients, arrival.sender),
            )

        def absorb(arrival: Arrival) -> None:
            with watch.running():
                self.server.absorb(arrival.client, admit(arrival))

        # Under a tree no upload is masked.
        answers = cast(Iterator[Reply | Lost | Late], self.transport.exchange(present, broadcast))
        yield from self.tree.climbed(answers, present, broadcast, admit, absorb)

    def _taken_in(self, client: int, upload: Message, expected: Schema, samples: int) -> bool:
        """Absorb an upload; returns False if it is not as the server expects and is left out.

        Args:
            client, upload: as they came from the wire.
            expected: its fields.
            samples: how many samples of the upload's task the client has.

        Raises:
            BadUpload: the upload is not as the server expects, and the run is set to end in this case.
        """
        announced = SampleCounts(samples, int(self._announced[client]))
        task = self.stream.tasks[upload.task]
        try:
            read = validate_upload(client, upload, self._middleware, self.server, expected, self.context, announced)
        except BadUpload as bad:
            if not self._drops:
                raise
            self._notices.tell(f"client {client}", f"{bad}; it is left out of the round (on_bad_upload=drop)")
            return False
        if task.index < self.state.tasks_done:
            self.server.absorb_late(client, read, task)
        elif self.tree is None or not self.tree.take(client, read, announced):
            self.server.absorb(client, read)
        return True

    def _absorb_total(self, total: Total, expected: Schema, samples: np.ndarray) -> None:
        """Absorb the sum of a round's uploads; `samples` (K,) is each client's number of samples of the task."""
        own = list(total.clients)
        announced = SampleCounts(int(samples[own].sum()), int(self._announced[own].sum()))
        # The sum did not travel in the wire's floating-point type.
        context = replace(self.context, wire=replace(self.context.wire, dtype=torch.float64))
        release = self.context.release
        upload = total.upload if release is None else release.counted(total.upload)
        read = validate_upload(
            *(EVERYONE, upload, self._middleware, self.server, expected, context, announced),
            clients=len(own),
            rounding=total.rounding,
        )
        if len(own) == 1:
            self._notices.tell(
                "alone",
                f"task {total.upload.task}, round {total.upload.round} has one client, whose upload the secure sum is;"
                " rounds like this hide nothing",
            )
        self.server.absorb(EVERYONE, read)

    def _note_revealed(self, client: int, alone: Leakage, columns: dict[str, np.ndarray]) -> None:
        """Count what an upload, or the sum that it is in, reveals about the samples that a client learnt from."""
        columns["one_sample_sums"][client] = alone.sums
        columns["one_sample_moments"][client] = alone.moments
        self.state.ledger.told.add(alone.samples)

    def _absorb_late(self, client: int, upload: Message) -> None:
        """Absorb an upload of an earlier round, if the server can still use it."""
        absences = self.state.absences
        absences["late_arrived"] += 1
        if self.context.sums:
            text = "late uploads are left out: the masks of their round are gone (secure=sums)"
            self._notices.tell("late", text, logging.INFO)
            return
        task = self.stream.tasks[upload.task]
        stage = self.server.late_stage(task, upload.round)
        if stage is None:
            self._notices.tell("late", "late uploads are of no use to this method and are left out", logging.INFO)
            return
        samples, _ = self.transport.samples(upload.task)
        if self._taken_in(client, upload, schema_of(self.server, task, stage), int(samples[client])):
            absences["late_absorbed"] += 1
        else:
            absences["late_dropped"] += 1
            self.server.lose_late(task)

    def _announce(self, task: Task, samples: np.ndarray) -> None:
        """Update how many samples clients have had up to this task, of which they have `samples` (K,)."""
        if self._announced_tasks != task.index:  # in a resumed run
            before = [self.transport.samples(index)[0] for index in range(task.index)]
            self._announced = np.sum([np.zeros(self.transport.clients, dtype=np.int64), *before], axis=0)
        self._announced, self._announced_tasks = self._announced + samples, task.index + 1

    def _observe(self, task: Task, client: int, guesses: torch.Tensor | None = None) -> None:
        """Show the audits what a client learns from."""
        for audit in self.audits.values():
            data = self.transport.everything
            assert data is not None
            client_data = data.client_data(task.index, client)
            audit.observe(task, client_data if guesses is None else client_data.with_pseudo_labels(guesses))

    def _everything(self, task: Task) -> FullData:
        """What audits look at after a task."""
        exam, data = self._examination, self.transport.everything
        assert data is not None
        return FullData(lambda: map(exam.inputs, exam.batches(task, self.server.pure_batches)), data.inputs)

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Everything that a resumed run needs, as JSON and tensors.

        Tensors whose names start with `GROWING` only gain rows from one call to the next. No tensor is a copy.
        """
        state, growing = self.state.save()
        tensors = {**self.server.state_dict(), **self.rounds.tensors()}
        for name, audit in self.audits.items():
            tensors |= {f"{_AUDIT}{name}.{key}": tensor for key, tensor in audit.state_dict().items()}
        tensors |= {CLIENT + key: tensor for key, tensor in self.transport.state_dict().items()}
        saved = {**state, "audits": {name: audit.rows for name, audit in self.audits.items()}}
        if self.tree is not None:
            saved, growing = {**saved, "tree": self.tree.state()}, {**growing, **self.tree.tensors()}
        return saved, {**tensors, **growing}

    def restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from what `save` returned."""
        self.state.restore(saved, tensors)
        if self.tree is not None:
            self.tree.restore(saved["tree"], tensors)
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
