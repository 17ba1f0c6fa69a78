"""What is measured after a task: right answers on the test sets of all tasks so far, under each way of asking."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from fcl_bench.data.splits.stream import Stream
from fcl_bench.engine.node import on_device
from fcl_bench.linalg.finite import all_finite
from fcl_bench.protocol.method import Server
from fcl_bench.protocol.problem import Prediction, Problem, TestBatch
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import generator

#: Samples scored at a time: their random features are the largest thing that evaluation holds.
BATCH = 1024
#: The ways of asking. `correct`: as the method predicts; `aware`: the sample's task is given, and only its classes
#: compete (under the task's own head, if it has one); `unrouted`: all classes seen compete, whatever task the method
#: thinks of; `routed`: whether the method named the right task.
WAYS = ("correct", "aware", "unrouted", "routed")


class Answers:
    """Counts (T, T) int64 for each of `WAYS`: row t, column tau counts the test set of task tau after task t.

    Attributes:
        routes: whether the method names tasks at all; without, `routed` means nothing and `unrouted` is `correct`.
    """

    def __init__(self, tasks: int) -> None:
        # A task's counts lie together: what is known after it never changes again.
        self._counts = np.zeros((tasks, len(WAYS), tasks), dtype=np.int64)
        self.routes = False

    def __getitem__(self, way: str) -> np.ndarray:
        return self._counts[:, WAYS.index(way)]

    def add(
        self,
        after: int,
        prediction: Prediction,
        columns: torch.Tensor,
        true_tasks: torch.Tensor,
        classes: list[torch.Tensor],
    ) -> None:
        """Count a batch.

        Args:
            after: index of the last task learnt.
            prediction: of n samples.
            columns: (n,) their true classes; a class not seen yet is never answered.
            true_tasks: (n,) the tasks whose test samples they are.
            classes: per task so far, the columns of its classes, ascending.
        """
        tasks = prediction.tasks
        right = {
            "unrouted": prediction.scores.argmax(dim=1) == columns,
            "aware": _best_of(prediction, classes, true_tasks) == columns,
        }
        right["correct"] = right["unrouted"]
        if tasks is not None:
            self.routes = True
            right["correct"] = _best_of(prediction, classes, tasks) == columns
            right["routed"] = tasks == true_tasks
        for way, hits in right.items():
            self[way][after] += np.bincount(true_tasks[hits].cpu().numpy(), minlength=len(self[way]))

    def state(self) -> dict[str, Any]:
        """What is no count, as JSON."""
        return {"routes": self.routes}

    def tensor(self, done: int) -> torch.Tensor:
        """(done, 4, T): the rows of the first `done` tasks, of each of `WAYS`, which never change again."""
        return torch.from_numpy(self._counts[:done])

    def restore(self, state: dict[str, Any], rows: torch.Tensor) -> None:
        """Take over what `state` and `tensor` returned."""
        self.routes = bool(state["routes"])
        self._counts[: len(rows)] = rows.numpy()


def _best_of(prediction: Prediction, classes: list[torch.Tensor], tasks: torch.Tensor) -> torch.Tensor:
    """The best class (n,) among those of each sample's task."""
    if prediction.heads is None:
        member = prediction.scores.new_zeros(len(classes), prediction.scores.shape[1], dtype=torch.bool)
        sizes = torch.tensor([len(columns) for columns in classes], device=tasks.device)
        task_of = torch.arange(len(classes), device=tasks.device).repeat_interleave(sizes)
        member[task_of, torch.cat(classes)] = True
        return prediction.scores.masked_fill(~member[tasks], -torch.inf).argmax(dim=1)
    best = torch.empty_like(tasks)
    for task, columns in enumerate(classes):
        chosen = tasks == task
        best[chosen] = columns[prediction.heads[task][chosen].argmax(dim=1)]
    return best


class Examination:
    """Asks a server about test samples, and counts its right answers.

    Args:
        problem: device, types, seed.
        stream: whose test samples.
        test: (n, ...) all of them; they move to the device.
    """

    def __init__(self, problem: Problem, stream: Stream, test: torch.Tensor) -> None:
        self._problem = problem
        self._stream = stream
        self._test = test.to(problem.device)
        self._classes = [torch.tensor(task.columns, device=problem.device) for task in stream.tasks]
        self._task_of = np.full(len(stream.test_columns), -1)
        for task in stream.tasks:
            self._task_of[stream.test[task.index]] = task.index

    def batches(self, task: Task, pure: int | None) -> Iterator[np.ndarray]:
        """Indices of the test samples of all tasks up to `task`; `pure`: see `test_batches`."""
        return test_batches(self._stream.test[: task.index + 1], pure, self._problem.seed)

    def inputs(self, indices: np.ndarray) -> torch.Tensor:
        """Test samples on the device."""
        return on_device(self._test, indices, self._problem)

    def take(self, task: Task, server: Server, answers: Answers) -> None:
        """Add what `server` answers after `task` to `answers`.

        Raises:
            FloatingPointError: a score is not finite.
        """
        pure = server.pure_batches
        for number, batch in enumerate(self.batches(task, pure)):
            # A partial batch is another one after the next task.
            stays = pure is None and len(batch) == BATCH
            asked = TestBatch(partial(self.inputs, batch), pure is not None, number if stays else None)
            prediction = server.classify(asked)
            if not all_finite(prediction.scores):
                raise FloatingPointError(f"class scores after task {task.index} are not finite")
            truth = self._stream.test_columns[batch], self._task_of[batch]
            columns, tasks = (torch.from_numpy(values).to(self._problem.device) for values in truth)
            answers.add(task.index, prediction, columns, tasks, self._classes[: task.index + 1])


def test_batches(test: tuple[np.ndarray, ...], pure: int | None, seed: int) -> Iterator[np.ndarray]:
    """Indices of the test samples in batches: as they come, or (`pure`) each of so many samples of one task.

    A task's samples are shuffled for that: a file that is sorted by class would make batches of a single class.
    """
    if pure is None:
        samples = np.concatenate(test)
        yield from (samples[begin : begin + BATCH] for begin in range(0, len(samples), BATCH))
        return
    for task, indices in enumerate(test):
        shuffled = generator(seed, "test batches", task).permutation(indices)
        yield from (shuffled[begin : begin + pure] for begin in range(0, len(shuffled), pure))
