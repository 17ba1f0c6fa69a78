"""FediCaRL's clients: what they keep and train on, also over an interruption, and as published."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars.fedicarl import EXEMPLARS, FediCaRLClient
from tests.methods.fedicarl_harness import (
    CLIENTS,
    both,
    context_on,
    fedicarl,
    kept_by,
    learnt,
    plain_directions,
    rows,
    tasks_on,
    trained_on,
    training,
)
from tests.methods.training_harness import federation_of, image_tasks
from tests.training.test_memory import plain_herding

# What clients keep ----------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("3-images", "8-images")
@both
@pytest.mark.parametrize("memory", [8, 3])
def test_the_budget_is_never_exceeded_and_shared_by_the_classes_a_client_has_had(trains, memory, caplog):
    tasks, had = tasks_on(trains), [set() for _ in range(CLIENTS)]
    before = [{} for _ in range(CLIENTS)]

    def after(federation):
        task = federation.state.tasks_done - 1
        for client, (samples, labels) in enumerate(tasks[task]):
            had[client] |= set(labels.tolist())
            kept = kept_by(federation, client)
            assert set(kept) == had[client]
            assert sum(map(len, kept.values())) <= memory
            for column, own in kept.items():
                share = memory // len(had[client])
                mine = samples[labels == column]
                if len(mine):
                    assert len(own) == min(share, len(mine))
                    assert not rows(own) - rows(mine)
                else:  # of an earlier task: its first ones are left
                    assert torch.equal(own, before[client][column][:share])
            before[client] = kept

    federation = learnt(fedicarl(trains=trains, memory=memory), trains, after=after)
    counts = [sum(map(len, kept_by(federation, client).values())) for client in range(CLIENTS)]
    assert federation.state.client_samples_kept >= max(max(counts), 1)
    value = 3 * 8 * 8 if trains == "images" else 4 * 6
    kept = dict(federation.state.client_storage_bytes)
    assert kept.pop("received") > 0  # the teacher, through a task
    assert kept == {trains: value * federation.state.client_samples_kept}
    kinds = {value.dtype for client in range(CLIENTS) for value in kept_by(federation, client).values()}
    assert kinds == {torch.uint8 if trains == "images" else torch.float32}
    assert ("keeps nothing from now on" in caplog.text) == (memory < 4)


@both
def test_exemplars_are_herded_under_the_tasks_final_model(trains):
    """With a random half of the clients in the rounds: also those who sat out choose."""
    tasks, compared = tasks_on(trains), []

    def after(federation):
        task = federation.state.tasks_done - 1
        for client, (samples, labels) in enumerate(tasks[task]):
            kept = kept_by(federation, client)
            for column in labels.unique().tolist():
                mine = samples[labels == column]
                if len(mine) == 2:  # equally near their mean: rounding decides which of them comes first
                    assert not rows(kept[column]) - rows(mine)
                    continue
                order = plain_herding(plain_directions(federation, mine).tolist(), len(kept[column]))
                assert torch.equal(kept[column].float(), mine[order].float())
                compared.append(len(mine))

    learnt(fedicarl(trains=trains, training=training(fraction=0.5)), trains, after=after)
    assert len(compared) > 10


def test_only_the_model_goes_down_for_the_choice_and_nothing_up():
    federation = learnt(fedicarl())
    body = sum(value.nbytes for name, value in federation.server.network.state().items() if name.startswith("body."))
    stage = [row for row in federation.state.ledger.uploads if row.stage == EXEMPLARS and row.labelled]
    assert all(row.down_bytes > body and row.up_bytes == 0 for row in stage)


def test_a_model_speaks_for_the_samples_and_the_exemplars_behind_it(monkeypatch):
    told, update = [], FediCaRLClient.update

    def noted(self, client_data, broadcast, state):
        upload, after = update(self, client_data, broadcast, state)
        told.append((broadcast.stage, upload.samples, len(client_data.labels), sum(map(len, state.values()))))
        return upload, after

    monkeypatch.setattr(FediCaRLClient, "update", noted)
    learnt(fedicarl())
    models = [entry for entry in told if entry[0] == "model"]
    assert all(samples == own + exemplars for _, samples, own, exemplars in models)
    assert any(exemplars for *_, exemplars in models)
    assert {samples for stage, samples, *_ in told if stage == EXEMPLARS} == {None}


# Resume, scarce labels, classes that come back ------------------------------------------------------------------------

UNIFORM = training(weighting="uniform")
VARIANTS = {
    "softmax": {},
    "nme": {"classify": "nme", "loss": "bce"},
    "published": {"variant": "published", "memory": 5, "training": UNIFORM},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_classes_that_come_back_are_learnt_and_kept_once(name, monkeypatch):
    first, second = image_tasks(np.random.default_rng(0), [4, 4], [[16, 12], [14, 10]])
    tasks = [first, [(samples, labels - 2) for samples, labels in second]]
    seen = trained_on(monkeypatch)
    federation = federation_of(fedicarl(**VARIANTS[name]), context_on("images"), tasks)
    federation.run(lambda _: None)
    assert federation.server.heads.sizes == [4, 2]
    assert all(torch.isfinite(value).all() for value in federation.server.network.state().values())
    assert {column for client in (0, 1) for column in kept_by(federation, client)} == set(range(6))
    assert any(len(labels) > len(tasks[task][client][1]) for task, _, client, _, labels in seen)


def test_a_client_without_a_label_keeps_nothing():
    federation = federation_of(fedicarl(), context_on("images"), tasks_on("images"), unlabelled=[(0, 1), (2, 1)])
    federation.run(lambda _: None)
    assert kept_by(federation, 1) == {}
    assert kept_by(federation, 0)


# As published ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("images")
@both
def test_published_keeps_all_that_was_and_draws_from_it_anew_in_every_round(trains, monkeypatch):
    seen, tasks = trained_on(monkeypatch), tasks_on(trains)
    federation = learnt(
        fedicarl(variant="published", memory=5, trains=trains, training=training(rounds=4, weighting="uniform")), trains
    )
    drawn: dict = {}
    for task, _, client, inputs, labels in seen:
        samples, own = tasks[task][client]
        past = [tasks[t][client] for t in range(task)]
        available = sum((rows(x) for x, _ in past), Counter())
        count = min(5, sum(len(y) for _, y in past))
        assert len(labels) == len(own) + count
        assert torch.equal(inputs[: len(own)].float(), samples.float())
        assert not rows(inputs[len(own) :]) - available
        if count:
            drawn.setdefault((task, client), set()).add(inputs[len(own) :].float().numpy().tobytes())
    assert all(len(found) == 4 for found in drawn.values())
    everything = [sum(len(clients[client][1]) for clients in tasks) for client in range(CLIENTS)]
    assert [sum(map(len, kept_by(federation, client).values())) for client in range(CLIENTS)] == everything
    assert federation.state.client_samples_kept == max(everything)


def test_published_goes_on_where_there_is_less_than_it_draws(monkeypatch):
    seen = trained_on(monkeypatch)
    learnt(fedicarl(variant="published", memory=300, training=UNIFORM))
    own = tasks_on("images")
    sizes = {(t, k): len(labels) for t, clients in enumerate(own) for k, (_, labels) in enumerate(clients)}
    for task, _, client, _, labels in seen:
        assert len(labels) == sum(sizes[t, client] for t in range(task + 1))
