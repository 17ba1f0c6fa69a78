"""The loop over tasks, rounds and clients: the only place that has the whole picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fcl_bench.data.stream import Stream, Task
from fcl_bench.evaluation.answers import Answers
from fcl_bench.evaluation.drift import FeatureDrift
from fcl_bench.federation.ledger import Ledger, Stopwatch, Upload
from fcl_bench.federation.message import Message
from fcl_bench.methods.base import Method, Problem, Shard
from fcl_bench.progress import progress
from fcl_bench.randomness import generator

#: Samples scored at a time: their random features are the largest thing that evaluation holds.
EVALUATION_BATCH = 4096
#: Prefixes of what a checkpoint keeps beside the server's tensors.
_AUDIT, _DRIFT, _CLIENT = "audit.", "drift.", "client."


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

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {
            "tasks_done": self.tasks_done,
            "answers": self.answers.state(),
            "ledger": self.ledger.state(),
            "bounds": self.bounds,
            "rounds_done": self.rounds_done,
            "server_seconds": self.server_seconds,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `to_json` returned."""
        self.tasks_done = saved["tasks_done"]
        self.answers.restore(saved["answers"])
        self.ledger.restore(saved["ledger"])
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
        train, test: the whole data set: features (n, d), or images (n, 3, h, w) in uint8, which move to the device.
        drift_samples: reference samples per client and task for the feature drift; 0: it is not measured.
    """

    def __init__(
        self,
        method: Method,
        problem: Problem,
        stream: Stream,
        shards: list[list[np.ndarray]],
        labelled: np.ndarray,
        train: torch.Tensor,
        test: torch.Tensor,
        drift_samples: int = 0,
    ) -> None:
        self.problem = problem
        self.stream = stream
        self.shards = shards
        self.labelled = labelled
        # Images are small as bytes, and every round needs them: they live on the device.
        where = problem.device if train.dtype == torch.uint8 else train.device
        self._train, self._test = train.to(where), test.to(where)
        self.client = method.client(problem)
        self.server = method.server(problem)
        self.audit = method.audit(problem)
        self.drift = FeatureDrift(drift_samples, problem.seed, shards) if drift_samples else None
        self._resumes_within_tasks = method.resumes_within_tasks
        self._after_round: Callable[[int, int], None] = lambda round_, of: None
        self.state = FederationState(0, Answers(len(stream.tasks)), Ledger(len(shards[0])))
        self._classes = [torch.tensor(task.columns, device=problem.device) for task in stream.tasks]
        self._task_of_test = np.full(len(stream.test_columns), -1)
        for task in stream.tasks:
            self._task_of_test[stream.test[task.index]] = task.index

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Everything that a resumed run needs, as JSON and tensors."""
        saved = {**self.state.to_json(), "drift": [] if self.drift is None else self.drift.rows}
        audit = {} if self.audit is None else self.audit.state_dict()
        drift = {} if self.drift is None else self.drift.tensors()
        extras = {_AUDIT + name: tensor for name, tensor in audit.items()}
        extras |= {_DRIFT + name: tensor for name, tensor in drift.items()}
        extras |= {_CLIENT + name: tensor for name, tensor in self.client.state_dict().items()}
        return saved, {**self.server.state_dict(), **extras}

    def restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from what `save` returned."""
        self.state.restore(saved)
        parts: dict[str, dict[str, torch.Tensor]] = {_AUDIT: {}, _DRIFT: {}, _CLIENT: {}, "": {}}
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
        available = [k for k, indices in enumerate(self.shards[task.index]) if self.labelled[indices].any()]
        with watch.running():
            self.server.start_task(task)
            rounds = self.server.rounds(task)
        for round_ in range(self.state.rounds_done, rounds):
            with watch.running():
                present = self.server.participants(task, round_, available)
                broadcast = self.server.broadcast(task, round_)
            self._exchange_all(task, round_, present, broadcast, watch)
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

    def _exchange_all(self, task: Task, round_: int, present: list[int], broadcast: Message, server: Stopwatch) -> None:
        """The turns of those present; to and from the others nothing is sent, and their rows say so."""
        uploads = {client: self._exchange(task, round_, client, broadcast, server) for client in present}
        for client in set(range(len(self.shards[task.index]))) - set(present):
            known, unknown = self._samples(task, client)
            held = len(known) + len(unknown), len(known)
            uploads[client] = Upload(task.index, round_, client, self.server.stage, *held, 0, 0, 0, 0, 0.0)
            if self.audit is not None and round_ == 0 and len(known):
                self.audit.observe(task, self._shard(task, client))
        self.state.ledger.uploads += [uploads[client] for client in sorted(uploads)]

    def _exchange(self, task: Task, round_: int, client: int, broadcast: Message, server: Stopwatch) -> Upload:
        """One client's turn."""
        problem = self.problem
        known, unknown = self._samples(task, client)
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
            accepted = int((guesses >= 0).sum())
            right = int((guesses.cpu() == self._columns(unknown)).sum())
        if self.audit is not None and round_ == 0:
            self.audit.observe(task, shard)
        return Upload(
            task.index,
            round_,
            client,
            self.server.stage,
            len(known) + len(unknown),
            len(known),
            accepted,
            right,
            message.nbytes,
            self.state.ledger.send(client, broadcast),
            watch.seconds,
        )

    def _samples(self, task: Task, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of a client's labelled samples of a task, and of the others."""
        indices = self.shards[task.index][client]
        return indices[self.labelled[indices]], indices[~self.labelled[indices]]

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

    def _test_batches(self, task: Task) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Indices and inputs (n, ...) of the test samples of all tasks so far, in batches as the server wants them."""
        for batch in test_batches(self.stream.test[: task.index + 1], self.server.pure_batches, self.problem.seed):
            yield batch, self._inputs(self._test, batch)

    def _examine(self, task: Task) -> None:
        """Everything that is measured after a task."""
        for batch, inputs in self._test_batches(task):
            prediction = self.server.classify(inputs, one_task=self.server.pure_batches is not None)
            if not bool(torch.isfinite(prediction.scores).all()):
                raise FloatingPointError(f"class scores after task {task.index} are not finite")
            truth = self.stream.test_columns[batch], self._task_of_test[batch]
            columns, tasks = (torch.from_numpy(values).to(self.problem.device) for values in truth)
            self.state.answers.add(task.index, prediction, columns, tasks, self._classes[: task.index + 1])
        if self.audit is not None:
            tests = (inputs for _, inputs in self._test_batches(task))
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
