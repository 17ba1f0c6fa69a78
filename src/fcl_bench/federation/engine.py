"""The loop over tasks, rounds and clients: the only place that has the whole picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fcl_bench.data.stream import Stream, Task
from fcl_bench.federation.ledger import Ledger, Stopwatch, Upload
from fcl_bench.federation.message import Message
from fcl_bench.methods.base import Method, Problem, Shard
from fcl_bench.progress import progress

#: Samples scored at a time: their random features are the largest thing that evaluation holds.
EVALUATION_BATCH = 4096
#: Prefix of the audit's tensors in a checkpoint.
_AUDIT = "audit."


@dataclass
class FederationState:
    """What a run has achieved so far; with the server's state, all that a resumed run needs.

    Attributes:
        tasks_done: number of complete tasks.
        correct: (T, T) int64, right answers on task tau's test set after task t.
        ledger: bytes and seconds.
        bounds: a row per complete task of what the method's audit found; empty without one.
    """

    tasks_done: int
    correct: np.ndarray
    ledger: Ledger
    bounds: list[dict[str, float | None]] = field(default_factory=list)


class Federation:
    """One method on one stream: trains task by task, evaluates after each.

    Args:
        method: the method's knobs.
        problem: dimensions, types, device, seed.
        stream: the data cut into tasks.
        shards: [task][client] -> indices of training samples.
        labelled: (n,) bool, which training samples' labels their clients know.
        train, test: features (n, d) of the whole data set.
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
    ) -> None:
        self.problem = problem
        self.stream = stream
        self.shards = shards
        self.labelled = labelled
        self._train = train
        self._test = test
        self.client = method.client(problem)
        self.server = method.server(problem)
        self.audit = method.audit(problem)
        tasks = len(stream.tasks)
        self.state = FederationState(0, np.zeros((tasks, tasks), dtype=np.int64), Ledger(len(shards[0])))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The server's state and the audit's: what a checkpoint keeps beside `state`."""
        audit = {} if self.audit is None else self.audit.state_dict()
        return {**self.server.state_dict(), **{_AUDIT + name: tensor for name, tensor in audit.items()}}

    def restore(self, state: FederationState, tensors: dict[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self.state = state
        self.server.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith(_AUDIT)})
        if self.audit is not None:
            self.audit.load_state_dict(
                {name.removeprefix(_AUDIT): tensor for name, tensor in tensors.items() if name.startswith(_AUDIT)}
            )

    def run(self, after_task: Callable[[Federation], Any]) -> FederationState:
        """All tasks that are not done yet; `after_task` is called after each (to save a checkpoint, say)."""
        with progress(len(self.stream.tasks), "learning", "task", done=self.state.tasks_done) as bar:
            for task in self.stream.tasks[self.state.tasks_done :]:
                self._learn(task)
                self.state.correct[task.index] = self._evaluate(task)
                if self.audit is not None:
                    tests = (inputs for _, inputs in self._test_batches(task))
                    self.state.bounds.append(self.audit.report(task, self.server, tests))
                self.state.tasks_done = task.index + 1
                after_task(self)
                bar.update()
        return self.state

    def _learn(self, task: Task) -> None:
        watch = Stopwatch(self.problem.device)
        with watch.running():
            self.server.start_task(task)
            rounds = self.server.rounds(task)
        for round_ in range(rounds):
            with watch.running():
                broadcast = self.server.broadcast(task, round_)
            for client, indices in enumerate(self.shards[task.index]):
                upload = self._exchange(task, round_, client, indices, broadcast, watch)
                self.state.ledger.uploads.append(upload)
            with watch.running():
                self.server.finish_round()
        with watch.running():
            self.server.finish_task()
        self.state.ledger.server_seconds.append(watch.seconds)

    def _exchange(
        self, task: Task, round_: int, client: int, indices: np.ndarray, broadcast: Message, server: Stopwatch
    ) -> Upload:
        """One client's turn. A client without a labelled sample takes no part: nothing is sent either way."""
        problem = self.problem
        known = indices[self.labelled[indices]]
        unknown = indices[~self.labelled[indices]]
        if len(known) == 0:
            return Upload(task.index, round_, client, self.server.stage, len(indices), 0, 0, 0, 0, 0, 0.0)
        shard = Shard(
            client, task.index, self._inputs(known), self._columns(known).to(problem.device), self._inputs(unknown)
        )
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
            len(indices),
            len(known),
            accepted,
            right,
            message.nbytes,
            broadcast.nbytes,
            watch.seconds,
        )

    def _inputs(self, indices: np.ndarray) -> torch.Tensor:
        return self._train[torch.from_numpy(indices)].to(self.problem.device, self.problem.dtype)

    def _columns(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.stream.train_columns[indices])

    def _test_batches(self, task: Task) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Indices and inputs (n, d) of the test samples of all classes seen, task by task, in batches."""
        samples = np.concatenate(self.stream.test[: task.index + 1])
        for begin in range(0, len(samples), EVALUATION_BATCH):
            batch = samples[begin : begin + EVALUATION_BATCH]
            yield batch, self._test[torch.from_numpy(batch)].to(self.problem.device, self.problem.dtype)

    def _evaluate(self, task: Task) -> np.ndarray:
        """Right answers (T,) on each test set seen so far; 0 for those to come."""
        seen = self.stream.test[: task.index + 1]
        task_of_sample = np.repeat(np.arange(len(seen)), [len(indices) for indices in seen])
        right = []
        for batch, inputs in self._test_batches(task):
            scores = self.server.predict(inputs)
            if not bool(torch.isfinite(scores).all()):
                raise FloatingPointError(f"class scores after task {task.index} are not finite")
            right.append(scores.argmax(dim=1).cpu().numpy() == self.stream.test_columns[batch])
        return np.bincount(task_of_sample[np.concatenate(right)], minlength=len(self.stream.tasks))
