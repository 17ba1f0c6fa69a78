"""The tests after a task: counts of right answers on the test sets of all tasks so far, for each way of asking.

Validation samples (`data.validation`) are asked about in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.ledger import Rows
from fcl_bench.engine.node import on_device
from fcl_bench.errors import UserError, kind_of
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.protocol.context import Context, Prediction, Task, TestBatch
from fcl_bench.protocol.method import Server
from fcl_bench.randomness import generator

if TYPE_CHECKING:
    from fcl_bench.engine.reports import BestRounds

_ANSWERS, _CONFUSION, _SAMPLES = (GROWING + name for name in ("answers", "confusion", "samples"))
#: Samples scored at a time: their random features take the most memory of evaluation.
BATCH = 1024
#: The ways of asking. `correct`: as the method predicts; `aware`: the sample's task is given, and only its classes
#: compete (under the task's own head, if it has one); `unrouted`: all classes seen compete, regardless of the task that
#: the method names; `routed`: whether the method named the right task.
WAYS = ("correct", "aware", "unrouted", "routed")
#: After task `after`: how many test samples of class `label` were classified as `answer`, both as columns.
CONFUSION = np.dtype([("after", np.int32), ("label", np.int32), ("answer", np.int32), ("samples", np.int32)])
#: After task `after`: the class of a test sample, its predicted class, and the score of the prediction.
SAMPLES = np.dtype(
    [("after", np.int32), ("sample", np.int64), ("label", np.int32), ("answer", np.int32), ("score", np.float64)]
)


class Predictions:
    """Counts (T, T) int64 for each of `WAYS`: row t, column tau counts the test set of task tau after task t.

    It also keeps the predicted classes, as `correct` counts them: as a confusion table and, on request, per sample.

    Attributes:
        routes: whether the method names tasks at all; if not, `routed` has no meaning and `unrouted` is `correct`.
        confusion: `CONFUSION` rows, those of each task's examination in turn, ascending.
        samples: `SAMPLES` rows in the same order; None if they are not kept.
    """

    def __init__(self, tasks: int, by_sample: bool = False) -> None:
        # A task's counts lie together, because they never change after its examination.
        self._counts = np.zeros((tasks, len(WAYS), tasks), dtype=np.int64)
        self.routes = False
        self.confusion = Rows(CONFUSION)
        self.samples = Rows(SAMPLES) if by_sample else None
        self._rows = {_CONFUSION: self.confusion}
        if self.samples is not None:
            self._rows[_SAMPLES] = self.samples
        #: Of the current examination: samples, true columns, answers, scores of the answers.
        self._given: list[tuple[np.ndarray, ...]] = []

    def __getitem__(self, way: str) -> np.ndarray:
        return self._counts[:, WAYS.index(way)]

    def add(
        self,
        after: int,
        prediction: Prediction,
        columns: torch.Tensor,
        true_tasks: torch.Tensor,
        classes: list[torch.Tensor],
        samples: np.ndarray | None = None,
    ) -> None:
        """Count a batch.

        Args:
            after: index of the last task learnt.
            columns: (n,) their true classes; a class not seen yet is never answered.
            true_tasks: (n,) the tasks whose test samples they are.
            samples: (n,) their indices, where single samples are kept.
        """
        tasks, best = prediction.tasks, chosen(prediction, classes)
        right = {
            "correct": best == columns,
            "aware": chosen(prediction, classes, true_tasks) == columns,
        }
        right["unrouted"] = right["correct"]
        if tasks is not None:
            self.routes = True
            right["unrouted"] = prediction.scores.argmax(dim=1) == columns
            right["routed"] = tasks == true_tasks
        for way, hits in right.items():
            self[way][after] += np.bincount(true_tasks[hits].cpu().numpy(), minlength=len(self[way]))
        scores = prediction.scores.gather(1, best.unsqueeze(1)).squeeze(1)
        of_samples = [] if self.samples is None or samples is None else [samples, scores.cpu().numpy()]
        self._given.append((columns.cpu().numpy(), best.cpu().numpy(), *of_samples))

    def finish(self, after: int) -> None:
        """End the examination after task `after`: all its batches have been counted."""
        if not self._given:  # no test sample yet
            return
        columns, answers, *of_samples = (np.concatenate(parts) for parts in zip(*self._given, strict=True))
        self._given = []
        pairs, counts = np.unique(np.stack([columns, answers]), axis=1, return_counts=True)
        self.confusion.extend(_table(CONFUSION, after, *pairs, counts))
        if self.samples is not None:
            samples, scores = of_samples
            order = np.argsort(samples)
            self.samples.extend(_table(SAMPLES, after, *(part[order] for part in (samples, columns, answers, scores))))

    def state(self) -> dict[str, Any]:
        """The part of the state that is not a count, as JSON."""
        return {"routes": self.routes}

    def tensors(self, done: int) -> dict[str, torch.Tensor]:
        """The counts (done, 4, T) of the first `done` tasks and the rows, as tensors that only grow."""
        found = {name: rows.tensor() for name, rows in self._rows.items()}
        return {_ANSWERS: torch.from_numpy(self._counts[:done]), **found}

    def restore(self, state: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.routes = bool(state["routes"])
        self._counts[: len(tensors[_ANSWERS])] = tensors[_ANSWERS].numpy()
        for name, rows in self._rows.items():
            rows.restore(tensors[name])


def _table(dtype: np.dtype, after: int, *columns: np.ndarray) -> np.ndarray:
    """Rows of the type whose first column is `after`."""
    rows = np.empty(len(columns[0]), dtype=dtype)
    for name, values in zip(dtype.names or (), (after, *columns), strict=True):
        rows[name] = values
    return rows


def chosen(prediction: Prediction, classes: list[torch.Tensor], tasks: torch.Tensor | None = None) -> torch.Tensor:
    """The predicted class (n,) of each sample, as a column.

    Args:
        classes: per task so far, the columns of its classes, ascending.
        tasks: (n,) the tasks whose classes alone compete; None: those that the prediction names, if it names any.
    """
    tasks = prediction.tasks if tasks is None else tasks
    if tasks is None:
        return prediction.scores.argmax(dim=1)
    if prediction.heads is None:
        member = prediction.scores.new_zeros(len(classes), prediction.scores.shape[1], dtype=torch.bool)
        sizes = torch.tensor([len(columns) for columns in classes], device=tasks.device)
        task_of = torch.arange(len(classes), device=tasks.device).repeat_interleave(sizes)
        member[task_of, torch.cat(classes)] = True
        return prediction.scores.masked_fill(~member[tasks], -torch.inf).argmax(dim=1)
    best = torch.empty_like(tasks)
    for task, columns in enumerate(classes):
        own = tasks == task
        best[own] = columns[prediction.heads[task][own].argmax(dim=1)]
    return best


@dataclass(frozen=True)
class Tested:
    """The samples that a server is asked about.

    Attributes:
        samples: (n, ...) features, or images in uint8; those of no task among them.
        columns: (n,) int64, the class of each, as a column.
        numbered: whether full batches have numbers, by which a server may keep what it computed from them; of one
            `Tested` of a run, since another's batches would have the same numbers.
    """

    samples: torch.Tensor
    columns: np.ndarray
    by_task: Sequence[np.ndarray]
    numbered: bool = True

    @property
    def sizes(self) -> np.ndarray:
        """(T,) how many samples each task has."""
        return np.array([len(own) for own in self.by_task])


class Evaluation:
    """Asks a server about samples that no client learns from, and counts its right answers."""

    def __init__(self, context: Context, tasks: Sequence[Task], tested: Tested) -> None:
        self._context = context
        self.tested = tested
        self._samples = tested.samples.to(context.device)
        self._classes = [torch.tensor(task.columns, device=context.device) for task in tasks]
        self._task_of = np.full(len(tested.columns), -1)
        for task, own in enumerate(tested.by_task):
            self._task_of[own] = task

    def batches(self, task: Task, pure: int | None) -> Iterator[np.ndarray]:
        """Indices of the test samples of all tasks up to `task`; `pure`: see `test_batches`."""
        return test_batches(self.tested.by_task[: task.index + 1], pure, self._context.seed)

    def inputs(self, indices: np.ndarray) -> torch.Tensor:
        return on_device(self._samples, indices, self._context)

    def take(self, task: Task, server: Server, answers: Predictions) -> None:
        """Add what `server` answers after `task` to `answers`.

        Raises:
            UserError: the answers are not as `Prediction` says, or a score is not finite.
        """
        pure = server.pure_batches
        for number, batch in enumerate(self.batches(task, pure)):
            # A partial batch has other samples after the next task.
            stays = self.tested.numbered and pure is None and len(batch) == BATCH
            self._ask(task, server, answers, batch, number if stays else None)
        answers.finish(task.index)

    def right_among(self, task: Task, server: Server, samples: np.ndarray) -> int:
        """How many of these samples (their indices) of the task are classified right, with the task given."""
        answers, pure = Predictions(len(self.tested.by_task)), server.pure_batches
        for batch in test_batches([samples], pure, self._context.seed):
            if len(batch):
                self._ask(task, server, answers, batch, None)
        return int(answers["aware"][task.index, task.index])

    def _ask(self, task: Task, server: Server, answers: Predictions, batch: np.ndarray, number: int | None) -> None:
        test_batch = TestBatch(partial(self.inputs, batch), server.pure_batches is not None, number)
        prediction = answer_of(server, server.classify(test_batch), len(batch), task)
        if not all_finite(prediction.scores):
            raise UserError(
                f"{type(server).__name__}: class scores after task {task.index} are not finite",
                "finite numbers, such as -1e30 for a class that is ruled out",
            )
        truth = self.tested.columns[batch], self._task_of[batch]
        columns, tasks = (torch.from_numpy(values).to(self._context.device) for values in truth)
        answers.add(task.index, prediction, columns, tasks, self._classes[: task.index + 1], batch)


def test_batches(test: Sequence[np.ndarray], pure: int | None, seed: int) -> Iterator[np.ndarray]:
    """Indices of the test samples in batches: in their order, or (`pure`) in batches of `pure` samples of one task.

    For `pure`, a task's samples are shuffled: a file that is sorted by class would give batches of a single class.
    """
    if pure is None:
        samples = np.concatenate(test)
        yield from (samples[begin : begin + BATCH] for begin in range(0, len(samples), BATCH))
        return
    for task, indices in enumerate(test):
        shuffled = generator(seed, "test batches", task).permutation(indices)
        yield from (shuffled[begin : begin + pure] for begin in range(0, len(shuffled), pure))


def answer_of(server: Server, prediction: Any, samples: int, task: Task) -> Prediction:
    """The server's prediction for test samples.

    Raises:
        UserError: it has not a row of scores for each sample and a column for each class seen so far, a score is not
            finite, or it names tasks that have not been.
    """
    where = f"{type(server).__name__}.classify"
    if not isinstance(prediction, Prediction):
        raise UserError(f"{where} returned {kind_of(prediction)}", "a Prediction, such as Prediction(scores)")
    tasks = prediction.tasks
    shape, scores = (samples, task.columns_seen), prediction.scores
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or scores.shape != shape:
        wanted = f"floating-point numbers {shape}, a row per test sample and a column per class seen so far"
        raise UserError(f"{where}: scores is {kind_of(scores)}", wanted)
    if tasks is not None:
        whole = isinstance(tasks, torch.Tensor) and tasks.dtype == torch.int64 and tasks.shape == (samples,)
        if not whole or (samples and not 0 <= int(tasks.min()) <= int(tasks.max()) <= task.index):
            last = "" if not whole or not samples else f" {int(tasks.min())} to {int(tasks.max())}"
            raise UserError(
                f"{where}: tasks is {kind_of(tasks)}{last} after task {task.index}",
                f"None, or int64 numbers ({samples},) from 0 to {task.index}",
            )
    return prediction


def pooled_after(task: int, correct: np.ndarray, tests: np.ndarray) -> float:
    """A_t in percent: accuracy on the pooled test sets of all tasks up to `task`, after it; NaN if there is no sample.

    Args:
        correct: (T, T) right answers on task tau's test set after task t.
        tests: (T,) sizes of the test sets.
    """
    whole = tests[: task + 1].sum()
    return float(100.0 * correct[task, : task + 1].sum() / whole) if whole else float("nan")


_ROUNDS = GROWING + "rounds"


class RoundAccuracy:
    """A_t after every N-th round of the model and after the task, on the pooled test sets of the tasks so far.

    It tests the server like a task's examination, and its time counts as neither the clients' nor the server's.

    Args:
        every: N; 0: nothing is measured.
        evaluations: by the name of rounds.csv's column; the first one's best rounds are reported.

    Attributes:
        columns: of a row of rounds.csv; an accuracy is NaN if there is no sample yet.
    """

    def __init__(self, every: int, evaluations: Mapping[str, Evaluation]) -> None:
        self.every = every
        self._evaluations = evaluations
        self.columns = ("task", "round", *evaluations)
        numbers = [("task", np.int32), ("round", np.int32), *((name, np.float64) for name in evaluations)]
        self._rows = Rows(np.dtype(numbers))

    def look(self, task: Task, round_: int, server: Server) -> None:
        """Test after a finished round of the task that is not the last one."""
        if not self.every or round_ not in (model := server.model_rounds(task)):
            return
        if (model.index(round_) + 1) % self.every == 0:
            found = {}
            for name, evaluation in self._evaluations.items():
                found[name] = Predictions(len(evaluation.tested.by_task))
                evaluation.take(task, server, found[name])
            self.finish(task, round_, found)

    def finish(self, task: Task, round_: int, answers: Mapping[str, Predictions]) -> None:
        """Add the row of a round whose server has been asked: the last one of a task that is over, say."""
        if not self.every:
            return
        accuracies = [
            pooled_after(task.index, answers[name]["correct"], evaluation.tested.sizes)
            for name, evaluation in self._evaluations.items()
        ]
        self._rows.extend(np.array([(task.index, round_, *accuracies)], dtype=self._rows.array.dtype))

    def values(self) -> list[tuple[Any, ...]]:
        """Task, round and accuracies in percent (NaN: no sample yet) of each row, in their order."""
        return self._rows.array.tolist()

    def best(self) -> BestRounds | None:
        """The best round of each task, the first of equals; None if nothing was measured."""
        if not self.every:
            return None
        rows, (first, evaluation) = self._rows.array, next(iter(self._evaluations.items()))
        return best_rounds(self.every, len(evaluation.tested.by_task), rows["task"], rows["round"], rows[first])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a resumed run needs; none if nothing is measured."""
        return {_ROUNDS: self._rows.tensor()} if self.every else {}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.every:
            self._rows.restore(tensors[_ROUNDS])


def best_rounds(every: int, tasks: int, task: np.ndarray, rounds: np.ndarray, accuracy: np.ndarray) -> BestRounds:
    """The best round of each of `tasks` tasks, of n rounds: (n,) their task, number and accuracy, NaN for none."""
    best: BestRounds = {"every": every, "best": [], "best_round": []}
    for own in (np.flatnonzero(task == number) for number in range(tasks)):
        first = None if np.isnan(accuracy[own]).all() else own[np.nanargmax(accuracy[own])]
        best["best"].append(None if first is None else float(accuracy[first]))
        best["best_round"].append(None if first is None else int(rounds[first]))
    return best
