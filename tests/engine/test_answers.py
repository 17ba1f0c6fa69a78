"""Counts of right answers against a loop over samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fcl_bench.engine.evaluation import WAYS, Predictions
from fcl_bench.protocol.context import Prediction

#: Classes that each task brings.
CLASSES = [3, 1, 4, 2]
TASK_OF = [task for task, count in enumerate(CLASSES) for _ in range(count)]


def members(after: int) -> list[torch.Tensor]:
    """The columns of each task so far."""
    return [torch.tensor([c for c, t in enumerate(TASK_OF) if t == task]) for task in range(after + 1)]


def best(scores: list[float], columns: list[int]) -> int:
    """The column with the largest score, the first of equals."""
    winner = columns[0]
    for column in columns[1:]:
        if scores[column] > scores[winner]:
            winner = column
    return winner


def counted(after: int, scores, truth, named) -> dict[str, np.ndarray]:
    """Sample by sample, straight from what each way of asking means."""
    counts = {way: np.zeros((len(CLASSES), len(CLASSES)), dtype=int) for way in WAYS}
    seen = list(range(sum(CLASSES[: after + 1])))
    for i, column in enumerate(truth):
        task = TASK_OF[column]
        row = scores[i].tolist()

        def of_task(t):
            return [c for c in seen if TASK_OF[c] == t]

        hits = {"unrouted": best(row, seen) == column, "aware": best(row, of_task(task)) == column}
        hits["correct"] = hits["unrouted"] if named is None else best(row, of_task(int(named[i]))) == column
        hits["routed"] = named is not None and int(named[i]) == task
        for way in WAYS:
            counts[way][after, task] += hits[way]
    return counts


def drawn(rng: np.random.Generator, after: int, count: int, routed: bool):
    """Scores in steps, so that there are ties; truths of unequal tasks; tasks that are right half of the time."""
    columns = sum(CLASSES[: after + 1])
    scores = torch.from_numpy(rng.integers(0, 6, (count, columns)) / 2.0)
    truth = torch.from_numpy(rng.integers(0, columns, count))
    right = torch.tensor(TASK_OF)[truth]
    named = torch.where(
        torch.from_numpy(rng.random(count) < 0.5), right, torch.from_numpy(rng.integers(0, after + 1, count))
    )
    return scores, truth, (named if routed else None)


def answered(batches) -> Predictions:
    answers = Predictions(len(CLASSES))
    for after, scores, truth, named in batches:
        task_of_column = torch.tensor(TASK_OF[: scores.shape[1]])
        answers.add(after, Prediction(scores, named), truth, task_of_column[truth], members(after))
    return answers


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_are_those_of_a_loop_over_samples(routed, dtype):
    rng = np.random.default_rng(0)
    expected = {way: np.zeros((4, 4), dtype=int) for way in WAYS}
    batches = []
    for after in range(4):
        for count in (1, 60, 7, 0):
            scores, truth, named = drawn(rng, after, count, routed)
            batches.append((after, scores.to(dtype), truth, named))
            found = counted(after, scores, truth.tolist(), named)
            expected = {way: expected[way] + found[way] for way in WAYS}
    answers = answered(batches)
    assert answers.routes is routed
    for way in WAYS:
        np.testing.assert_array_equal(answers[way], expected[way], err_msg=way)
        assert not np.triu(answers[way], 1).any()
    if routed:
        assert not np.array_equal(answers["correct"], answers["unrouted"])
        assert (answers["aware"] >= answers["correct"]).all()


def test_without_routing_correct_is_unrouted_and_nothing_is_routed():
    scores, truth, _ = drawn(np.random.default_rng(1), 3, 200, False)
    answers = answered([(3, scores, truth, None)])
    np.testing.assert_array_equal(answers["correct"], answers["unrouted"])
    assert not answers["routed"].any()
    assert answers["correct"].any()


def test_a_task_named_right_every_time_is_the_task_given():
    scores, truth, _ = drawn(np.random.default_rng(2), 3, 200, False)
    answers = answered([(3, scores, truth, torch.tensor(TASK_OF)[truth])])
    np.testing.assert_array_equal(answers["correct"], answers["aware"])
    np.testing.assert_array_equal(answers["routed"][3], np.bincount(np.array(TASK_OF)[truth.numpy()], minlength=4))


def test_scores_of_other_tasks_never_win_however_large_or_small():
    scores = torch.tensor([[-3e38, -2e38, 0.0, 3e38]])
    task_of_column = torch.tensor([0, 0, 0, 1])
    for column, right in ((0, 0), (1, 0), (2, 1), (3, 0)):
        answers = Predictions(4)
        truth = torch.tensor([column])
        answers.add(1, Prediction(scores, torch.tensor([0])), truth, task_of_column[truth], members(1))
        assert answers["correct"].sum() == right
        assert answers["aware"].sum() == (column in (2, 3))
        assert answers["unrouted"].sum() == (column == 3)
        assert answers["routed"].sum() == (column != 3)


def test_a_head_of_its_own_answers_for_its_task():
    """Two tasks that share the classes 0 and 2; the second head thinks otherwise of them; class 1 is of task 0 only."""
    classes = [torch.tensor([0, 1, 2]), torch.tensor([0, 2])]
    heads = (torch.tensor([[3.0, 0, 1], [0, 0, 9], [0, 9, 0]]), torch.tensor([[0.0, 2], [1, 0], [5, 4]]))
    scores = torch.stack([torch.maximum(heads[0][:, 0], heads[1][:, 0]), heads[0][:, 1], heads[0][:, 2]], dim=1)
    scores[:, 2] = torch.maximum(scores[:, 2], heads[1][:, 1])
    truth, true_tasks = torch.tensor([2, 2, 1]), torch.tensor([1, 0, 0])
    answers = Predictions(2)
    answers.add(1, Prediction(scores, torch.tensor([1, 1, 0]), heads), truth, true_tasks, classes)
    assert answers["aware"][1].tolist() == [2, 1]
    assert answers["correct"][1].tolist() == [1, 1]  # the second is routed wrong, and head 1 says class 0
    assert answers["unrouted"][1].tolist() == [2, 0]
    assert answers["routed"][1].tolist() == [1, 1]


def test_a_class_that_is_not_seen_yet_is_never_answered():
    scores = torch.tensor([[1.0, 2.0]])
    answers = Predictions(2)
    answers.add(0, Prediction(scores), torch.tensor([3]), torch.tensor([0]), [torch.tensor([0, 1])])
    assert not any(answers[way].any() for way in WAYS)


@pytest.mark.parametrize("routed", [False, True])
def test_answers_survive_being_saved(routed):
    rng = np.random.default_rng(3)
    first, second = [(after, *drawn(rng, after, 50, routed)) for after in (1, 2)]
    restored, before = Predictions(4), answered([first])
    restored.restore(
        json.loads(json.dumps(before.state())), {name: rows.clone() for name, rows in before.tensors(2).items()}
    )
    assert restored.routes is routed
    scores, truth, named = second[1:]
    restored.add(2, Prediction(scores, named), truth, torch.tensor(TASK_OF)[truth], members(2))
    whole = answered([first, second])
    for way in WAYS:
        np.testing.assert_array_equal(restored[way], whole[way])
        assert restored[way].dtype == np.int64
    assert any((restored[way] != before[way]).any() for way in WAYS)
