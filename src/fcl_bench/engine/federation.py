"""The loop over tasks, rounds and clients: the only place that has the whole picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fcl_bench.audits.drift import FeatureDrift
from fcl_bench.data.partitions.holdings import Holdings
from fcl_bench.data.splits.stream import Stream
from fcl_bench.engine.answers import Answers
from fcl_bench.engine.growing import GROWING
from fcl_bench.engine.kept_batches import KeptBatches
from fcl_bench.engine.ledger import Ledger, Stopwatch
from fcl_bench.protocol.message import Message, all_finite
from fcl_bench.protocol.method import Method, Prediction, Problem, Shard
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import generator
from fcl_bench.tracking.progress import progress

#: Samples scored at a time: their random features are the largest thing that evaluation holds.
EVALUATION_BATCH = 1024
#: Prefixes of what a checkpoint keeps beside the server's tensors.
_AUDIT, _DRIFT, _CLIENT = "audit.", "drift.", "client."
_ANSWERS = GROWING + "answers"


@dataclass
class FederationState:
    """What a run has achieved so far; with the tensors, all that a resumed run needs.

    Attributes:
        tasks_done: number of complete tasks.
        answers: right answers so far.
        ledger: bytes and seconds.
        bounds: a row per complete task of what the method's audit found; empty without one.
        rounds_done: complete rounds of the task at hand.
        server_seconds: of those rounds.
    """

    tasks_done: int
    answers: Answers
    ledger: Ledger
    bounds: list[dict[str, float | None]] = field(default_factory=list)
    rounds_done: int = 0
    server_seconds: float = 0.0

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """All of it: a little JSON, and what grows with tasks, clients and rounds as tensors that only gain rows."""
        saved = {
            "tasks_done": self.tasks_done,
            "answers": self.answers.state(),
            "ledger": self.ledger.state(),
            "bounds": self.bounds,
            "rounds_done": self.rounds_done,
            "server_seconds": self.server_seconds,
        }
        return saved, {**self.ledger.tensors(), _ANSWERS: self.answers.tensor(self.tasks_done)}

    def restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `save` returned."""
        self.tasks_done = saved["tasks_done"]
        self.answers.restore(saved["answers"], tensors[_ANSWERS])
        self.ledger.restore(saved["ledger"], tensors)
        self.bounds = saved["bounds"]
        self.rounds_done = saved["rounds_done"]
        self.server_seconds = saved["server_seconds"]


class Federation:
    """One method on one stream: trains task by task, evaluates after each.

    Args:
        method: the method's knobs.
        problem: dimensions, types, device, seed.
        stream: the data cut into tasks.
        shards: [task][client] -> indices of training samples.
        labelled: (n,) bool, which training samples' labels their clients know.
        train, test: the whole data set: features (n, d), or images (n, 3, h, w) in uint8; both move to the device.
        drift_samples: reference samples per client and task for the feature drift; 0: it is not measured.
    """

    def __init__(
        self,
        method: Method,
        problem: Problem,
        stream: Stream,
        shards: Sequence[Sequence[np.ndarray]],
        labelled: np.ndarray,
        train: torch.Tensor,
        test: torch.Tensor,
        drift_samples: int = 0,
    ) -> None:
        self.problem = problem
        self.stream = stream
        self.shards = [Holdings.of(clients) for clients in shards]
        self.labelled = labelled
        # They live on the device: a copy per client and round would cost more than what is done with it there.
        self._train, self._test = train.to(problem.device), test.to(problem.device)
        self.client = method.client(problem)
        self.server = method.server(problem)
        self.audit = method.audit(problem)
        self.drift = FeatureDrift(drift_samples, problem.seed, self.shards) if drift_samples else None
        self._resumes_within_tasks = method.resumes_within_tasks
        self._after_round: Callable[[int, int], None] = lambda round_, of: None
        self.state = FederationState(0, Answers(len(stream.tasks)), Ledger(len(self.shards[0])))
        self._classes = [torch.tensor(task.columns, device=problem.device) for task in stream.tasks]
        self._kept = KeptBatches(EVALUATION_BATCH)
        self._task_of_test = np.full(len(stream.test_columns), -1)
        for task in stream.tasks:
            self._task_of_test[stream.test[task.index]] = task.index

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Everything that a resumed run needs, as JSON and tensors.

        The tensors whose names start with `GROWING` only gain rows from one call to the next, and like the others they
        are not copies.
        """
        state, growing = self.state.save()
        saved = {**state, "drift": [] if self.drift is None else self.drift.rows}
        audit = {} if self.audit is None else self.audit.state_dict()
        drift = {} if self.drift is None else self.drift.tensors()
        extras = {_AUDIT + name: tensor for name, tensor in audit.items()}
        extras |= {_DRIFT + name: tensor for name, tensor in drift.items()}
        extras |= {_CLIENT + name: tensor for name, tensor in self.client.state_dict().items()}
        return saved, {**self.server.state_dict(), **extras, **growing}

    def restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from what `save` returned."""
        self.state.restore(saved, tensors)
        parts: dict[str, dict[str, torch.Tensor]] = {_AUDIT: {}, _DRIFT: {}, _CLIENT: {}, GROWING: {}, "": {}}
        for name, tensor in tensors.items():
            prefix = next(prefix for prefix in parts if name.startswith(prefix))
            parts[prefix][name.removeprefix(prefix)] = tensor
        self.server.load_state_dict(parts[""])
        self.client.load_state_dict(parts[_CLIENT])
        if self.audit is not None:
            self.audit.load_state_dict(parts[_AUDIT])
        if self.drift is not None:
            self.drift.restore(saved["drift"], parts[_DRIFT])

    def run(self, checkpoint: Callable[[Federation], Any], every: int | None = None) -> FederationState:
        """All tasks that are not done yet.

        Args:
            checkpoint: called after each task (to save it, say), and within tasks as `every` says.
            every: number of rounds after which it is called too, if the method can go on from there.
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
                self._examine(task)
                self.state.tasks_done = task.index + 1
                checkpoint(self)
        return self.state

    def _learn(self, task: Task) -> None:
        watch = Stopwatch(self.problem.device, self.state.server_seconds)
        known = self.shards[task.index].chosen(self.labelled)
        available = np.flatnonzero(known).tolist()
        with watch.running():
            self.server.start_task(task)
            rounds = self.server.rounds(task)
        for round_ in range(self.state.rounds_done, rounds):
            with watch.running():
                present = self.server.participants(task, round_, available)
                broadcast = self.server.broadcast(task, round_)
            self._exchange_all(task, round_, present, known, broadcast, watch)
            with watch.running():
                self.server.finish_round()
            if self.audit is not None:
                self.audit.look(task, round_, self.server)
            self.state.rounds_done = round_ + 1
            self.state.server_seconds = watch.seconds
            self._after_round(round_ + 1, rounds)
        with watch.running():
            self.server.finish_task()
        self.state.ledger.server_seconds.append(watch.seconds)
        self.state.rounds_done, self.state.server_seconds = 0, 0.0

    def _exchange_all(
        self, task: Task, round_: int, present: list[int], known: np.ndarray, broadcast: Message, server: Stopwatch
    ) -> None:
        """The turns of those present; to and from the others nothing is sent, and their rows say so.

        Args:
            known: (K,) labelled samples of each client.
        """
        ledger, held = self.state.ledger, self.shards[task.index].sizes()
        counted = ("accepted", "right", "up_bytes", "down_bytes")
        columns: dict[str, np.ndarray] = {name: np.zeros(len(held), dtype=np.int64) for name in counted}
        columns |= {"client": np.arange(len(held)), "samples": held, "labelled": known}
        columns["client_seconds"] = seconds = np.zeros(len(held))
        for client in present:
            up_bytes, guessed, seconds[client] = self._exchange(task, round_, client, broadcast, server)
            columns["accepted"][client], columns["right"][client] = guessed
            columns["up_bytes"][client] = up_bytes
            columns["down_bytes"][client] = ledger.send(client, broadcast)
        if self.audit is not None and round_ == 0:
            for client in sorted(set(np.flatnonzero(known).tolist()) - set(present)):
                self.audit.observe(task, self._shard(task, client))
        ledger.add_round(task.index, round_, self.server.stage, columns)

    def _exchange(
        self, task: Task, round_: int, client: int, broadcast: Message, server: Stopwatch
    ) -> tuple[int, tuple[int, int], float]:
        """One client's turn: bytes sent, how many labels it gave itself, how many of them are right, its seconds.

        Nothing of the upload outlives it.
        """
        problem = self.problem
        shard = self._shard(task, client)
        accepted = right = 0
        watch = Stopwatch(problem.device)
        with watch.running():
            guesses = self.client.pseudo_labels(shard)
            if guesses is not None:
                shard = shard.with_pseudo_labels(guesses)
            message = self.client.update(shard, broadcast).to_wire(problem.wire)
        with server.running():
            self.server.absorb(client, message.from_wire(problem.dtype, problem.device))
        if guesses is not None:
            _, unknown = self._samples(task, client)
            accepted = int((guesses >= 0).sum())
            right = int((guesses.cpu() == self._columns(unknown)).sum())
        if self.audit is not None and round_ == 0:
            self.audit.observe(task, shard)
        return message.nbytes, (accepted, right), watch.seconds

    def _samples(self, task: Task, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of a client's labelled samples of a task, and of the others."""
        indices = self.shards[task.index][client]
        known = self.labelled[indices]
        return (indices, indices[:0]) if known.all() else (indices[known], indices[~known])

    def _shard(self, task: Task, client: int) -> Shard:
        known, unknown = self._samples(task, client)
        labels = self._columns(known).to(self.problem.device)
        return Shard(client, task.index, self._inputs(self._train, known), labels, self._inputs(self._train, unknown))

    def _inputs(self, side: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
        """Samples on the device: images as they are, features in the statistics' type."""
        chosen = side[torch.from_numpy(indices).to(side.device)]
        return chosen if chosen.dtype == torch.uint8 else chosen.to(self.problem.device, self.problem.dtype)

    def _columns(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.stream.train_columns[indices])

    def _test_batches(self, task: Task) -> Iterator[np.ndarray]:
        """Indices of the test samples of all tasks so far, in batches as the server wants them."""
        return test_batches(self.stream.test[: task.index + 1], self.server.pure_batches, self.problem.seed)

    def _classify(self, number: int, batch: np.ndarray) -> Prediction:
        """What the server says of the batch of this number."""
        if (kept := self._kept.get(number)) is not None:
            return self.server.classify_prepared(kept)
        inputs = self._inputs(self._test, batch)
        if self.server.pure_batches is not None:
            return self.server.classify(inputs, one_task=True)
        prepared = self.server.prepare(inputs)
        if prepared is None:
            return self.server.classify(inputs)
        self._kept.offer(number, prepared)
        return self.server.classify_prepared(prepared)

    def _examine(self, task: Task) -> None:
        """Everything that is measured after a task."""
        for number, batch in enumerate(self._test_batches(task)):
            prediction = self._classify(number, batch)
            if not all_finite(prediction.scores):
                raise FloatingPointError(f"class scores after task {task.index} are not finite")
            truth = self.stream.test_columns[batch], self._task_of_test[batch]
            columns, tasks = (torch.from_numpy(values).to(self.problem.device) for values in truth)
            self.state.answers.add(task.index, prediction, columns, tasks, self._classes[: task.index + 1])
        if self.audit is not None:
            tests = (self._inputs(self._test, batch) for batch in self._test_batches(task))
            self.state.bounds.append(self.audit.report(task, self.server, tests))
        if self.drift is not None:
            self.drift.observe(task.index, lambda chosen: self.server.embed(self._inputs(self._train, chosen)))


def test_batches(test: tuple[np.ndarray, ...], pure: int | None, seed: int) -> Iterator[np.ndarray]:
    """Indices of the test samples in batches: as they come, or (`pure`) each of so many samples of one task.

    A task's samples are shuffled for that: a file that is sorted by class would make batches of a single class.
    """
    if pure is None:
        samples = np.concatenate(test)
        yield from (samples[begin : begin + EVALUATION_BATCH] for begin in range(0, len(samples), EVALUATION_BATCH))
        return
    for task, indices in enumerate(test):
        shuffled = generator(seed, "test batches", task).permutation(indices)
        yield from (shuffled[begin : begin + pure] for begin in range(0, len(shuffled), pure))
