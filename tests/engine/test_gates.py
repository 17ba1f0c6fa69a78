"""Each gate fires on a planted case, and none on a healthy run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.engine.evaluation import Evaluation, Predictions, Tested
from fcl_bench.engine.gates import Gates, none_yet
from fcl_bench.protocol.context import Context, Prediction, Task, WireFormat
from tests.small_runs import interrupted_in, run_in

PER_CLASS, ROUNDS = 50, 8
TASKS = [Task(0, range(2), 2, (0, 1), (0, 1)), Task(1, range(2, 4), 4, (2, 3), (2, 3))]


class Served:
    """A server that is right about a given share of the samples, which are their own classes' numbers."""

    pure_batches = None

    def __init__(self, right: float = 1.0, weights: float = 1.0, idle: str = "") -> None:
        self.right, self.weights, self.idle = right, weights, idle

    def model_rounds(self, task):
        return range(ROUNDS)

    def classify(self, batch):
        columns = batch.inputs.squeeze(1).long()
        wrong = torch.arange(len(columns)) >= round(self.right * len(columns))
        other = columns + 1 - 2 * (columns % 2)  # the other class of the same task
        seen = 2 * (int(columns.max()) // 2 + 1)
        return Prediction(torch.nn.functional.one_hot(torch.where(wrong, other, columns), seen).double())

    def watched(self):
        return {"weights": torch.full((3,), self.weights), "counts": torch.zeros(2, dtype=torch.int64)}

    def gates(self):
        return {"idle_term": self.idle} if self.idle else {}


def looked_at(before: Served, quarter: Served, after: Served, share: float = 0.5) -> list[tuple[str, str]]:
    """The gates of one task, given the server at its start, three quarters of the way, and at its end."""
    of_first = round(2 * PER_CLASS * share)
    columns = np.repeat([0, 1], [of_first, 2 * PER_CLASS - of_first])
    columns = np.random.default_rng(0).permutation(columns)
    context = Context(1, 0, torch.float64, torch.device("cpu"), WireFormat(torch.float32))
    tested = Tested(torch.from_numpy(columns)[:, None].double(), columns, [np.arange(2 * PER_CLASS)])
    evaluation, state = Evaluation(context, TASKS[:1], tested), none_yet()
    gates = Gates(evaluation, state)
    gates.begin(TASKS[0], before)
    for round_ in range(ROUNDS - 1):
        gates.look(TASKS[0], round_, quarter)
    answers = Predictions(1)
    evaluation.take(TASKS[0], after, answers)
    gates.finish(TASKS[0], after, answers)
    return [(found["gate"], found["text"]) for found in state["found"]]


def test_a_sound_task_meets_none():
    assert looked_at(Served(0.5), Served(0.9), Served(0.91)) == []


def test_chance_is_what_one_class_always_answered_would_give():
    assert [gate for gate, _ in looked_at(Served(), Served(0.5), Served(0.5))] == ["chance"]
    assert [gate for gate, _ in looked_at(Served(), Served(0.85), Served(0.85), share=0.9)] == ["chance"]
    assert looked_at(Served(), Served(0.85), Served(0.85)) == []
    assert looked_at(Served(), Served(1.0), Served(1.0), share=1.0) == []  # a task of a single class has no chance


def test_weights_that_grow_by_orders_of_magnitude():
    grown = looked_at(Served(weights=1.0), Served(), Served(weights=101.0))
    assert grown == [("growth", "the root mean square of weights is 101, from 1")]
    assert looked_at(Served(weights=1.0), Served(), Served(weights=99.0)) == []
    assert looked_at(Served(weights=0.0), Served(), Served(weights=9.0)) == []  # from nothing to something
    assert [gate for gate, _ in looked_at(Served(), Served(), Served(weights=float("nan")))] == ["growth"]


def test_accuracy_that_still_rises():
    [(gate, text)] = looked_at(Served(), Served(0.7), Served(0.9))
    assert (gate, text) == ("rising", "its accuracy still rose by 20.0 points in the last quarter of its rounds")
    assert looked_at(Served(), Served(0.88), Served(0.9)) == []  # within what 100 samples can tell
    assert looked_at(Served(), Served(0.9), Served(0.7)) == []


def test_the_samples_that_are_asked_about_within_a_task_are_spread_over_it():
    """A file may be sorted by class: its first thousand samples would be of one class."""
    columns = np.repeat([0, 1], 1500)
    context = Context(1, 0, torch.float64, torch.device("cpu"), WireFormat(torch.float32))
    tested = Tested(torch.from_numpy(columns)[:, None].double(), columns, [np.arange(3000)])
    some = Gates(Evaluation(context, TASKS[:1], tested), none_yet())._some(TASKS[0])
    assert len(some) == 1000
    assert columns[some].mean() == 0.5


def test_what_a_method_says_of_its_own_terms():
    assert looked_at(Served(), Served(), Served(idle="all is clipped")) == [("idle_term", "all is clipped")]


SMALL = ("method=fedavg", "backbone=tiny", "backbone.width=8", "tasks=2", "clients=2", "beta=1")
SMALL += ("method.training.rounds=6", "method.training.epochs=2", "method.training.momentum=0.9")
PLANTED = {
    "chance": ("method.training.lr=1e-8",),
    "growth": ("method.training.lr=12", "method.training.momentum=0", "method.training.weight_decay=0"),
    "idle_term": ("method=fedewc", "method.fisher_max=1e-12", "method.training.lr=0.05"),
    "rising": ("method.training.lr=0.004", "method.training.momentum=0.5"),
}


@pytest.mark.slow
@pytest.mark.parametrize("gate", PLANTED)
def test_a_run_with_a_planted_fault_says_so(gate, tmp_path):
    record = run_in(tmp_path, *SMALL, *PLANTED[gate]).record
    assert gate in {found["gate"] for found in record["gates"]}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_gates(tmp_path, monkeypatch):
    typed = (*SMALL, *PLANTED["rising"], "checkpoint_rounds=5")
    whole = run_in(tmp_path / "whole", *typed)
    with interrupted_in(1, monkeypatch):
        run_in(tmp_path / "parts", *typed)
    assert whole.record["gates"]
    assert run_in(tmp_path / "parts", *typed).record["gates"] == whole.record["gates"]


@pytest.mark.parametrize("method", ["afl", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_a_healthy_run_is_silent(method, tmp_path):
    trained = (*SMALL, "method.training.rounds=20", "method.training.lr=0.05", "method.loss_classes=task")
    typed = trained if method == "fedavg" else ("method=afl", "tasks=3")
    assert run_in(tmp_path, *typed).record["gates"] == []
