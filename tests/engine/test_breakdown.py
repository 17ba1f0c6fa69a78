"""Accuracy per class and client against loops over single samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.data.partitions.base import Holdings
from fcl_bench.engine.evaluation import CONFUSION, Predictions
from fcl_bench.engine.metrics import class_accuracy, client_accuracy
from fcl_bench.protocol.context import Prediction

T, C, K = 3, 5, 4
#: The task that brings each class.
TASK_OF = np.array([0, 0, 1, 2, 2])


@pytest.fixture
def examined():
    """Three examinations in two batches each: the counts, and for each the truths, answers, scores and samples."""
    rng, answers, all_of = np.random.default_rng(0), Predictions(T, by_sample=True), []
    for after in range(T):
        seen = int((after >= TASK_OF).sum())
        truth = rng.integers(0, seen, 40)
        if after == 1:
            truth[truth == 1] = 0  # a class without a test sample
        scores = torch.from_numpy(rng.standard_normal((40, seen)))
        samples = rng.permutation(100)[:40]
        classes = [torch.from_numpy(np.flatnonzero(task == TASK_OF)) for task in range(after + 1)]
        for rows in (slice(0, 25), slice(25, 40)):
            columns = torch.from_numpy(truth[rows])
            tasks = torch.from_numpy(TASK_OF[truth[rows]])
            answers.add(after, Prediction(scores[rows]), columns, tasks, classes, samples[rows])
        answers.finish(after)
        all_of.append((truth, scores.argmax(dim=1).numpy(), scores.max(dim=1).values.numpy(), samples))
    return answers, all_of


def test_confusion_is_what_a_loop_counts(examined):
    answers, all_of = examined
    for after, (truth, said, *_) in enumerate(all_of):
        expected = np.zeros((C, C), dtype=int)
        for label, answer in zip(truth, said, strict=True):
            expected[label, answer] += 1
        own = answers.confusion.array[answers.confusion.array["after"] == after]
        found = np.zeros((C, C), dtype=int)
        found[own["label"], own["answer"]] = own["samples"]
        np.testing.assert_array_equal(found, expected)
        assert len(own) == (expected > 0).sum()
        assert found.trace() == answers["correct"][after].sum()


def test_samples_are_kept_by_index(examined):
    answers, all_of = examined
    for after, (truth, said, scores, samples) in enumerate(all_of):
        own = answers.samples.array[answers.samples.array["after"] == after]
        order = np.argsort(samples)
        expected = {"sample": samples, "label": truth, "answer": said, "score": scores}
        for name, values in expected.items():
            np.testing.assert_array_equal(own[name], values[order])


def test_a_routed_answer_is_the_one_that_counts():
    """The class of the task that is named, and not the largest score."""
    answers = Predictions(2)
    scores, classes = torch.tensor([[0.1, 0.9, 0.5]]), [torch.tensor([0]), torch.tensor([1, 2])]
    answers.add(1, Prediction(scores, torch.tensor([0])), torch.tensor([1]), torch.tensor([1]), classes)
    answers.finish(1)
    assert answers.confusion.array.tolist() == [(1, 1, 0, 1)]


def test_an_examination_without_a_test_sample_leaves_no_row():
    answers = Predictions(2, by_sample=True)
    answers.finish(0)
    assert len(answers.confusion) == len(answers.samples) == 0


def test_class_accuracy_is_the_share_of_each_classes_samples(examined):
    answers, all_of = examined
    found = class_accuracy(answers.confusion.array, T, C)
    for after, (truth, said, *_) in enumerate(all_of):
        for label in range(C):
            own = truth == label
            expected = 100 * (said[own] == label).mean() if own.any() else np.nan
            np.testing.assert_allclose(found[after, label], expected)
    assert np.isnan(found[1, 1])
    assert np.isnan(found[0, 2:]).all()


def test_client_accuracy_weighs_classes_as_the_client_does():
    """a_k(t) = sum_c n_kc(t) a_c(t) / sum_c n_kc(t), sample by sample."""
    rng = np.random.default_rng(1)
    columns = rng.integers(0, C, 60)
    by_class = rng.uniform(0, 100, (T, C))
    by_class[0, 2:] = np.nan
    by_class[:, 1] = np.nan  # never tested
    holdings = []
    for task in range(T):
        own = np.flatnonzero(TASK_OF[columns] == task)
        owner = rng.integers(0, K - 1, len(own))  # the last client never has one
        holdings.append(Holdings.of(own[owner == client] for client in range(K)))
    found = client_accuracy(by_class, holdings, columns)
    for after in range(T):
        for client in range(K):
            had = [columns[i] for task in range(after + 1) for i in holdings[task][client]]
            values = [by_class[after, c] for c in had if not np.isnan(by_class[after, c])]
            np.testing.assert_allclose(found[after, client], np.mean(values) if values else np.nan)
    assert np.isnan(found[:, K - 1]).all()
    assert not np.isnan(found[-1, : K - 1]).any()


def test_a_client_with_the_tests_mix_sees_the_pooled_accuracy():
    confusion = np.array([(0, 0, 0, 6), (0, 0, 1, 2), (0, 1, 1, 1), (0, 1, 0, 3)], dtype=CONFUSION)
    by_class = class_accuracy(confusion, 1, 2)
    columns = np.array([0] * 8 + [1] * 4 + [0])
    found = client_accuracy(by_class, [Holdings.of([np.arange(12), np.array([12])])], columns)
    np.testing.assert_allclose(found, [[100 * 7 / 12, 75.0]])
