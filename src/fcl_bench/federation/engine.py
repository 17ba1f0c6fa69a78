"""The loop over tasks, rounds and clients: the only place that has the whole picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class FederationState:
    """What a run has achieved so far; with the server's state, all that a resumed run needs.

    Attributes:
        tasks_done: number of complete tasks.
        correct: (T, T) int64, right answers on task tau's test set after task t.
        ledger: bytes and seconds.
    """

    tasks_done: int
    correct: np.ndarray
    ledger: Ledger


class Federation:
    """One method on one stream: trains task by task, evaluates after each.

    Args:
        method: the method's knobs.
        problem: dimensions, types, device, seed.
        stream: the data cut into tasks.
        shards: [task][client] -> indices of training samples.
        train, test: features (n, d) of the whole data set.
    """

    def __init__(
        self,
        method: Method,
        problem: Problem,
        stream: Stream,
        shards: list[list[np.ndarray]],
        train: torch.Tensor,
        test: torch.Tensor,
    ) -> None:
        self.problem = problem
        self.stream = stream
        self.shards = shards
        self._train = train
        self._test = test
        self.client = method.client(problem)
        self.server = method.server(problem)
        tasks = len(stream.tasks)
        self.state = FederationState(0, np.zeros((tasks, tasks), dtype=np.int64), Ledger(len(shards[0])))

    def restore(self, state: FederationState, server: dict[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self.state = state
        self.server.load_state_dict(server)

    def run(self, after_task: Callable[[Federation], Any]) -> FederationState:
        """All tasks that are not done yet; `after_task` is called after each (to save a checkpoint, say)."""
        with progress(len(self.stream.tasks), "learning", "task", done=self.state.tasks_done) as bar:
            for task in self.stream.tasks[self.state.tasks_done :]:
                self._learn(task)
                self.state.correct[task.index] = self._evaluate(task)
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
        """One client's turn. A client without samples takes no part: nothing is sent either way."""
        problem = self.problem
        if len(indices) == 0:
            return Upload(task.index, round_, client, self.server.stage, 0, 0, 0, 0.0)
        rows = torch.from_numpy(indices)
        shard = Shard(
            client,
            task.index,
            self._train[rows].to(problem.device, problem.dtype),
            torch.from_numpy(self.stream.train_columns[indices]).to(problem.device),
        )
        watch = Stopwatch(problem.device)
        with watch.running():
            message = self.client.update(shard, broadcast).to_wire(problem.wire_dtype)
        with server.running():
            self.server.absorb(client, message.from_wire(problem.dtype, problem.device))
        return Upload(
            task.index,
            round_,
            client,
            self.server.stage,
            len(indices),
            message.nbytes,
            broadcast.nbytes,
            watch.seconds,
        )

    def _evaluate(self, task: Task) -> np.ndarray:
        """Right answers (T,) on each test set seen so far; 0 for those to come."""
        seen = self.stream.test[: task.index + 1]
        samples = np.concatenate(seen)
        task_of_sample = np.repeat(np.arange(len(seen)), [len(indices) for indices in seen])
        right = np.empty(len(samples), dtype=bool)
        for begin in range(0, len(samples), EVALUATION_BATCH):
            batch = slice(begin, begin + EVALUATION_BATCH)
            inputs = self._test[torch.from_numpy(samples[batch])].to(self.problem.device, self.problem.dtype)
            scores = self.server.predict(inputs)
            if not bool(torch.isfinite(scores).all()):
                raise FloatingPointError(f"class scores after task {task.index} are not finite")
            right[batch] = scores.argmax(dim=1).cpu().numpy() == self.stream.test_columns[samples[batch]]
        return np.bincount(task_of_sample[right], minlength=len(self.stream.tasks))
