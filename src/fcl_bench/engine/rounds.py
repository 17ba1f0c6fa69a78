"""Accuracy round by round, on test data: for curves, and for papers that print the best of their rounds."""

from __future__ import annotations

import numpy as np
import torch

from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.evaluation import Evaluation, Predictions
from fcl_bench.engine.exchanges import Rows
from fcl_bench.engine.metrics import pooled_after
from fcl_bench.engine.reports import BestRounds
from fcl_bench.protocol.method import Server
from fcl_bench.protocol.task import Task

#: The stored form of a row; the accuracy is NaN if there is no test sample yet.
_ROW = np.dtype([("task", np.int32), ("round", np.int32), ("accuracy", np.float64)])
_ROWS = GROWING + "rounds"


class RoundAccuracy:
    """A_t after every N-th round of the model and after the task, on the pooled test sets of the tasks so far.

    It tests the server like a task's examination, and its time counts as neither the clients' nor the server's.

    Args:
        every: N; 0: nothing is measured.
        examination: asks the server.
        tests: (T,) how many test samples each task has.
    """

    def __init__(self, every: int, examination: Evaluation, tests: np.ndarray) -> None:
        self.every = every
        self._examination = examination
        self._tests = tests
        self._rows = Rows(_ROW)

    def look(self, task: Task, round_: int, server: Server) -> None:
        """Test after a finished round of the task that is not the last one."""
        if not self.every or round_ not in (model := server.model_rounds(task)):
            return
        if (model.index(round_) + 1) % self.every == 0:
            answers = Predictions(len(self._tests))
            self._examination.take(task, server, answers)
            self._add(task, round_, answers)

    def finish(self, task: Task, last_round: int, answers: Predictions) -> None:
        """Add the row of a task that is over and examined."""
        if self.every:
            self._add(task, last_round, answers)

    def _add(self, task: Task, round_: int, answers: Predictions) -> None:
        accuracy = pooled_after(task.index, answers["correct"], self._tests)
        self._rows.extend(np.array([(task.index, round_, accuracy)], dtype=_ROW))

    def values(self) -> list[tuple[int, int, float]]:
        """Task, round and accuracy in percent (NaN: no test sample yet) of each row, in their order."""
        return self._rows.array.tolist()

    def best(self) -> BestRounds | None:
        """The best round of each task, the first of equals; None if nothing was measured."""
        if not self.every:
            return None
        rows = self._rows.array
        best: BestRounds = {"every": self.every, "best": [], "best_round": []}
        for task in range(len(self._tests)):
            own = rows[rows["task"] == task]
            known = not np.isnan(own["accuracy"]).all()
            row = own[np.nanargmax(own["accuracy"])] if known else None
            best["best"].append(None if row is None else float(row["accuracy"]))
            best["best_round"].append(None if row is None else int(row["round"]))
        return best

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a resumed run needs; none if nothing is measured."""
        return {_ROWS: self._rows.tensor()} if self.every else {}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `tensors` returned."""
        if self.every:
            self._rows.restore(tensors[_ROWS])
