"""Which test batches a closed-form server keeps the features of, and that keeping them changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.engine import evaluation as examination
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form import base
from fcl_bench.methods.closed_form.algebra.random_features import RandomFeatures
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.protocol.context import TestBatch
from fcl_bench.training.knobs import Training
from tests.methods.harness import context_of, draw_tasks, learn, learn_task, stream_of
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context

TASKS = draw_tasks(np.random.default_rng(0), 6, [3, 2], [[20, 9], [15, 12]])


def learnt(**options):
    return learn(STSA(M=10), context_of(6, **options), TASKS)[0]


def numbered(count: int, number: int | None) -> tuple[TestBatch, list[int]]:
    """A batch, and a list that gains an entry whenever its samples are loaded."""
    inputs = torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number or 99))
    loads: list[int] = []
    return TestBatch(lambda: loads.append(count) or inputs, number=number), loads


def again(batch: TestBatch) -> TestBatch:
    """The same samples after the next task: a new object that has not loaded them."""
    return TestBatch(batch.load, number=batch.number)


def test_a_numbered_batch_is_loaded_and_mapped_once():
    server = learnt()
    batch, loads = numbered(7, number=0)
    first = server.classify(batch).scores
    for _ in range(3):
        assert torch.equal(server.classify(again(batch)).scores, first)
    assert loads == [7]
    torch.testing.assert_close(first, server.predict(batch.inputs))


def test_a_batch_without_a_number_is_mapped_every_time_and_never_kept():
    server = learnt()
    batch, loads = numbered(7, number=None)
    for _ in range(3):
        server.classify(again(batch))
    assert loads == [7] * 3
    assert held(server) == 0


def held(server) -> int:
    return sum(H.nbytes for H in server._cached.values())


def test_what_does_not_fit_is_not_kept(monkeypatch):
    """Room for one batch of 3 and no more; a smaller one that still fits is kept later."""
    monkeypatch.setattr(base, "KEPT_FEATURES", 8 * 10 * 4)
    server = learnt()
    made = [numbered(count, number) for number, count in enumerate((3, 3, 1))]
    for _ in range(2):
        for batch, _ in made:
            server.classify(again(batch))
    assert [len(loads) for _, loads in made] == [1, 2, 1]
    assert held(server) == 8 * 10 * 4


def test_what_was_kept_is_scored_by_the_classifier_at_hand():
    method, context = STSA(M=10), context_of(6)
    first, second = stream_of(TASKS)
    server = method.server(context)
    batch, loads = numbered(7, number=4)
    learn_task(method, context, server, first, TASKS[0])
    assert server.classify(again(batch)).scores.shape == (7, 3)
    learn_task(method, context, server, second, TASKS[1])
    scores = server.classify(again(batch)).scores
    assert len(loads) == 1
    assert scores.shape == (7, 5)
    assert torch.equal(scores, learnt().classify(again(batch)).scores)


def test_a_batch_so_wide_that_it_is_mapped_by_blocks_is_not_kept_whole(monkeypatch):
    monkeypatch.setattr(RandomFeatures, "rows", 5)
    server = learnt()
    batch, loads = numbered(7, number=0)
    for _ in range(2):
        torch.testing.assert_close(server.classify(again(batch)).scores, server.predict(batch.load()))
    assert len(loads) == 4
    assert held(server) == 0


@pytest.mark.parametrize("budget", [0, 8 * 10 * 4 * 2, 2**28])
def test_answers_do_not_depend_on_what_was_kept(budget, monkeypatch):
    """The smallest batches, so that nearly all samples are kept, some, or none."""
    tasks = feature_tasks(1, [2, 3, 2], [[9, 8], [7, 12], [5, 6]])

    def answers():
        federation = federation_of(STSA(M=10), context_of(6), tasks)
        asked = federation.run(lambda _: None).answers["correct"]
        return asked, len(federation.server._cached)

    usual, kept = answers()
    assert kept == 0  # no batch is full
    monkeypatch.setattr(base, "KEPT_FEATURES", budget)
    monkeypatch.setattr(examination, "BATCH", 4)
    small, kept = answers()
    np.testing.assert_array_equal(small, usual)
    assert kept == {0: 0, 8 * 10 * 4 * 2: 2, 2**28: 47 // 4}[budget]


class Asked(FedAvg):
    """Notes the numbers of the batches that its server is asked about."""

    numbers: list[tuple[int, int | None]] = []  # noqa: RUF012

    def server(self, context):
        server = super().server(context)
        classify = server.classify

        def noted(batch):
            self.numbers.append((len(batch.inputs), batch.number))
            return classify(batch)

        server.classify = noted
        return server


def test_full_batches_have_numbers_and_partial_ones_have_none(monkeypatch):
    """A partial batch is another one after the next task."""
    monkeypatch.setattr(examination, "BATCH", 4)
    method = Asked(training=Training(rounds=1, epochs=1, augment="none"))
    method.numbers.clear()
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[6], [4]])
    federation_of(method, tiny_context(), tasks).run(lambda _: None)
    assert method.numbers == [(4, 0), (2, None), (4, 0), (4, 1), (2, None)]
