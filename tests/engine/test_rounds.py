"""Accuracy round by round, against runs that end with those rounds."""

from __future__ import annotations

import csv
import time

import numpy as np
import pytest
import torch

from fcl_bench.engine.evaluation import Evaluation, Predictions, RoundAccuracy, Tested
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.protocol.context import Prediction, Task
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.small_methods import NAMES, short_run, trains_by_gradient
from tests.small_runs import run_in


def training(rounds: int) -> Training:
    return Training(rounds=rounds, epochs=1, batch_size=8, lr=0.05, augment="none")


def learnt(method, every, tasks=2):
    data = image_tasks(np.random.default_rng(0), [3] * tasks, [[12, 9]] * tasks)
    federation = federation_of(method, tiny_context(), data, evaluate_rounds=every)
    federation.run(lambda _: None)
    return federation


def after_task(federation) -> list[float]:
    """A_t in percent: the federations here test each task on its 21 training samples."""
    correct = federation.state.answers["correct"]
    return [100 * correct[t, : t + 1].sum() / (21 * (t + 1)) for t in range(len(correct))]


@pytest.mark.slow
def test_a_round_is_what_a_task_of_so_many_rounds_would_end_with():
    watched = learnt(FedAvg(training=training(5)), every=2, tasks=1)
    expected = [(0, rounds - 1, after_task(learnt(FedAvg(training=training(rounds)), 0, 1))[0]) for rounds in (2, 4, 5)]
    np.testing.assert_allclose(watched.rounds.values(), expected)
    assert len({accuracy for *_, accuracy in expected}) > 1


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_every_nth_round_and_the_last_of_each_task(every):
    federation = learnt(FedAvg(training=training(3)), every)
    rounds = sorted({*range(every - 1, 3, every), 2})
    assert [row[:2] for row in federation.rounds.values()] == [(t, r) for t in range(2) for r in rounds]
    last = {task: accuracy for task, _, accuracy in federation.rounds.values()}
    assert list(last.values()) == pytest.approx(after_task(federation))


def test_watching_changes_no_bit_of_the_run():
    watched, not_watched = (learnt(FOT(training=training(3), columns=8), every) for every in (1, 0))
    for name, value in not_watched.server.state_dict().items():
        assert torch.equal(watched.server.state_dict()[name], value), name
    assert (watched.state.answers["correct"] == not_watched.state.answers["correct"]).all()
    assert not_watched.rounds.values() == []
    assert not_watched.rounds.best() is None


@pytest.mark.slow
def test_rounds_are_counted_as_uploads_are_and_the_last_row_comes_after_all_stages():
    """FOT has a round for its bases after those of the model; FedProTIP cannot name a task before its last round."""
    fot = learnt(FOT(training=training(3), columns=8), every=2)
    assert [row[:2] for row in fot.rounds.values()] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    routed = learnt(FedProTIP(training=training(2), columns=8), every=1)
    assert [row[:2] for row in routed.rounds.values()] == [(0, 3), (1, 3)]
    blind = learnt(FedProTIP(training=training(2), columns=8, tip=None), every=1)
    assert [row[:2] for row in blind.rounds.values()] == [(t, r) for t in range(2) for r in (0, 1, 2)]


def test_a_method_of_one_round_has_one_row_per_task():
    data = feature_tasks(0, [2, 2], [[15, 9]] * 2, inputs=tiny_context().inputs)
    federation = federation_of(AFL(), tiny_context(), data, evaluate_rounds=1)
    federation.run(lambda _: None)
    assert [row[:2] for row in federation.rounds.values()] == [(0, 0), (1, 0)]
    assert federation.rounds.best()["best_round"] == [0, 0]


def test_it_costs_the_method_no_second(monkeypatch):
    take = Evaluation.take

    def slow(self, *arguments):
        time.sleep(0.5)
        take(self, *arguments)

    monkeypatch.setattr(Evaluation, "take", slow)
    begin = time.perf_counter()
    ledger = learnt(FedAvg(training=training(3)), every=1, tasks=1).state.ledger
    spent = time.perf_counter() - begin
    assert spent > 1.5
    assert ledger.runtime()["server_seconds"] + ledger.runtime()["client_seconds"] < spent - 1.5


class Told:
    """A server that is right about as many of the samples as it is told."""

    pure_batches = None

    def model_rounds(self, task):
        return [0, 1, 2, 3]


def sizes_of(tests: list[int]) -> Tested:
    """So many samples of each task, of which only the numbers matter."""
    return Tested(torch.zeros(0), np.zeros(0, dtype=np.int64), [np.arange(count) for count in tests])


def accuracy_of(rights: list[list[int]], tests: list[int]) -> RoundAccuracy:
    """Of a model that is right `rights[task][round]` times."""
    told = iter([right for task in rights for right in task])

    class Exam:
        tested = sizes_of(tests)

        def take(self, task, server, answers):
            right = next(told)
            scores = torch.zeros(tests[0], 2)
            scores[:right, 0] = scores[right:, 1] = 1
            classes = [torch.tensor([0, 1])] * (task.index + 1)
            zeros = torch.zeros(tests[0], dtype=torch.int64)
            answers.add(task.index, Prediction(scores), zeros, zeros, classes)

    exam = Exam()
    measured = RoundAccuracy(1, {"accuracy": exam})
    for index, task_rights in enumerate(rights):
        task = Task(index, range(2 * index, 2 * index + 2), 2 * index + 2)
        for round_ in range(len(task_rights) - 1):
            measured.look(task, round_, Told())
        answers = Predictions(len(tests))
        exam.take(task, Told(), answers)
        measured.finish(task, len(task_rights) - 1, {"accuracy": answers})
    return measured


def test_the_best_is_the_first_of_the_highest():
    best = accuracy_of([[1, 3, 3, 2], [4, 1, 0, 4]], [4, 0]).best()
    assert best == {"every": 1, "best": [75.0, 100.0], "best_round": [1, 0]}


def test_without_test_samples_there_is_no_best():
    measured = accuracy_of([[0, 0]], [0])
    assert [np.isnan(value) for *_, value in measured.values()] == [True, True]
    assert measured.best() == {"every": 1, "best": [None], "best_round": [None]}


def test_what_is_kept_only_grows_and_is_taken_over_whole():
    measured = accuracy_of([[1, 3], [2, 4]], [4, 0])
    [(name, kept)] = measured.tensors().items()
    assert name.startswith("rows.")
    again = RoundAccuracy(1, {"accuracy": None})
    again.restore({name: kept.clone()})
    assert again.values() == measured.values()
    assert RoundAccuracy(0, {"accuracy": None}).tensors() == {}


@pytest.mark.slow_cases("fedavg")
@pytest.mark.parametrize(
    "name",
    [
        name if name == "fedavg" else pytest.param(name, marks=pytest.mark.slow)
        for name in [*filter(trains_by_gradient, NAMES), "fedcbc"]
    ],
)
def test_every_method_that_trains_can_be_watched(name, tmp_path):
    """A task's last row is its A_t and of its last exchange, whatever comes after the model's rounds."""
    run = run_in(tmp_path, *short_run(name), "data=digits", "tasks=2", "clients=2", "evaluate_rounds=1")
    last: dict[str, float] = {}
    rounds = []
    with (run.folder / "rounds.csv").open() as file:
        for row in csv.DictReader(file):
            last[row["task"]] = float(row["accuracy"])
            rounds.append((int(row["task"]), int(row["round"])))
    assert len(set(rounds)) == len(rounds)
    with (run.folder / "uploads.csv").open() as file:
        exchanged = {(int(row["task"]), int(row["round"])) for row in csv.DictReader(file)}
    assert dict(sorted(rounds)) == dict(sorted(exchanged))
    assert list(last.values()) == run.record["metrics"]["accuracy"]
    assert min(np.subtract(run.record["rounds"]["best"], list(last.values()))) >= 0
