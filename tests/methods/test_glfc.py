"""GLFC's clients: against the equations in NumPy, what they notice, keep and learn from, and its knobs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.exemplars.glfc import GLFC, GLFCClient
from fcl_bench.methods.exemplars.memory import EXEMPLARS
from fcl_bench.training.objective import Objective
from fcl_bench.typed import typed_instance
from tests.methods.classical_harness import INPUTS, assert_as_written_down
from tests.methods.classical_harness import training as on_features
from tests.methods.glfc_harness import (
    SIZES,
    classes,
    glfc,
    learnt,
    made,
    scripted,
    short_descent,
    state_of_client,
    tasks_of,
    training,
    turns,
)
from tests.methods.glfc_oracle import Plain, loss
from tests.methods.training_harness import federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import feature_context, model_of, same
from tests.training.test_memory import plain_herding

__all__ = ["short_descent"]
pytestmark = pytest.mark.usefixtures("short_descent")

NONE = {"proxy": "none"}


def rows(samples: torch.Tensor) -> Counter:
    return Counter(row.float().numpy().tobytes() for row in samples)


# The whole of it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurring", [False, True])
@pytest.mark.parametrize("memory", [0, 6, 100])
def test_training_on_features_is_what_the_equations_say(memory, recurring):
    """Weights by group, exemplars, the old model and the average; a client that misses a task, one that joins late."""
    knobs = on_features(batch_size=200, epochs=3, lr=0.5)
    method = GLFC(knobs, trains="features", memory=memory, **NONE)
    oracle = Plain(memory, lr=0.5)
    if not memory:
        oracle.keep = lambda *_: None
    assert_as_written_down(method, oracle, recurring)


def test_on_images_the_old_model_is_in_evaluation_mode_and_sees_the_batch_as_it_is():
    """The loss of a batch from logits that are computed here, of both models."""
    context, tasks = tiny_context(), tasks_of()
    method = glfc(**NONE)
    federation = federation_of(method, context, tasks[:1])
    federation.run(lambda _: None)
    server = federation.server
    whole = federation_of(method, context, tasks)
    server.start_task(whole.stream.tasks[1])
    broadcast = server.broadcast(whole.stream.tasks[1], 0)
    client, client_data = method.client(context), whole.transport.everything.client_data(1, 0)
    client.take_over(client_data, broadcast)
    state = {"classes.learnt": torch.tensor([0, 1]), "signal": torch.tensor(True)}
    objective = client.objective(client_data, broadcast, state)
    images = client.trainer.standardise(client_data.inputs)
    client.network.eval()
    with torch.no_grad():
        q = client.network(images).double().numpy()
    old = server.predict(client_data.inputs)[:, :2].double().numpy()
    client.network.train()
    with torch.no_grad():
        found = objective.score_loss(torch.from_numpy(q), client_data.labels, images)
    assert float(found) == pytest.approx(loss(q, client_data.labels.tolist(), {0, 1}, old), rel=1e-5)


# Signals --------------------------------------------------------------------------------------------------------------


def test_at_the_boundary_a_client_has_a_signal_in_its_first_round_of_a_task(monkeypatch):
    """Whichever round that is."""
    seen = turns(monkeypatch)
    learnt(glfc(training=training(rounds=4, fraction=0.5), **NONE))
    first: dict = {}
    for turn in seen:
        task, _, client = turn["at"]
        assert turn["signal"] == ((task, client) not in first)
        first.setdefault((task, client), turn["at"])
    assert any(round_ > 0 for _, round_, _ in first.values())
    assert len(first) > 4


def test_what_a_client_has_learnt_is_what_it_had_in_earlier_tasks(monkeypatch):
    seen, tasks = turns(monkeypatch), tasks_of()
    federation = learnt(glfc(**NONE))
    for turn in seen:
        task, _, client = turn["at"]
        had = {int(label) for earlier in tasks[:task] for label in earlier[client][1]}
        assert turn["learnt"] == sorted(had)
    assert classes(federation, 1) == [0, 1]
    assert classes(federation, 1, "current") == [4, 5]


@pytest.mark.parametrize("columns", [2, 3, 4, 10])
def test_the_first_signal_by_entropy_needs_four_classes(columns):
    """Under weights of 0 predictions are uniform: H = log C. Once it falls, or stays, the signal is gone."""
    method = GLFC(on_features(lr=1e-9), trains="features", signal="entropy", **NONE)
    rng, context = np.random.default_rng(0), feature_context(INPUTS)
    inputs = torch.from_numpy(rng.standard_normal((2 * columns, INPUTS)))
    labels = torch.arange(columns).repeat(2)
    federation = federation_of(method, context, [[(inputs, labels)]])
    [task] = federation.stream.tasks
    server, client = federation.server, method.client(context)
    server.start_task(task)
    client_data = federation.transport.everything.client_data(0, 0)
    found, state = [], {}
    for scale in (0.0, 0.0, 1e4, 0.0):
        # Large weights make predictions confident; then uniform ones are a rise again.
        server.network.load({"heads.0.weight": scale * torch.eye(columns, INPUTS)})
        _, state = client.update(client_data, server.broadcast(task, 0), state)
        found.append(bool(state["signal"]))
        if not scale:
            assert float(state["entropy"]) == pytest.approx(np.log(columns), abs=1e-3)
    assert found == [columns > 3, False, False, columns > 3]


ONE = [[12], [12], [12]]


def test_by_entropy_the_last_tasks_classes_are_learnt_when_the_signal_comes_and_not_before(monkeypatch):
    """Three rounds of three tasks; signals in (0, 0) and (1, 1). In the third task there is none."""
    scripted(monkeypatch, [2.0, 1.0, 1.0, 1.1, 2.4, 1.0, 2.0, 2.1, 2.2])
    seen, tasks = turns(monkeypatch), tasks_of(ONE)
    federation = learnt(glfc(signal="entropy", training=training(rounds=3), **NONE), ONE)
    assert [turn["at"][:2] for turn in seen if turn["signal"]] == [(0, 0), (1, 1)]
    for turn in seen:
        after = turn["at"][:2] >= (1, 1)
        assert turn["learnt"] == ([0, 1] if after else [])
        assert len(turn["labels"]) == turn["own"] + (8 if after else 0)
        exemplars = turn["inputs"][turn["own"] :]
        assert not rows(exemplars) - rows(tasks[0][0][0])
    # The second task's samples wait for a signal that has not come; once it comes they are replaced by exemplars.
    state = state_of_client(federation, 0)
    assert torch.equal(state["inputs.last"], tasks[1][0][0])
    assert torch.equal(state["inputs.current"], tasks[2][0][0])
    assert classes(federation, 0, "last") == [2, 3]
    assert federation.state.client_samples_kept == 8 + 12 + 12


@pytest.mark.slow
def test_by_entropy_a_second_signal_in_a_task_changes_nothing(monkeypatch):
    scripted(monkeypatch, [2.0, 1.0, 1.0, 2.4, 1.0, 2.4])
    lengths = []
    federation = made(glfc(signal="entropy", training=training(rounds=3)), ONE[:2])
    federation.run(
        lambda done: lengths.append(
            sum(len(v) for n, v in state_of_client(done, 0).items() if n.startswith("images."))
        ),
        every=1,
    )
    # A checkpoint after every round: the memory is there from the second task's first on.
    assert (lengths, classes(federation, 0)) == ([0, 0, 0, 8, 8, 8], [0, 1])


def test_exemplars_by_signal_are_herded_under_the_model_that_came_with_it(monkeypatch):
    scripted(monkeypatch, [2.0, 1.0, 3.0, 1.0])
    method, tasks = glfc(signal="entropy", memory=8, **NONE), tasks_of(ONE[:2])
    ends: list = []
    federation = learnt(method, ONE[:2], after=lambda done: ends.append(done.server.embed(tasks[0][0][0])))
    phi = ends[0].double().numpy()
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    images, labels = tasks[0][0]
    for column in (0, 1):
        mine = (labels == column).numpy()
        order = plain_herding(phi[mine].tolist(), 4)
        assert torch.equal(state_of_client(federation, 0)[f"images.{column}"], images[labels == column][order])


# Memory ---------------------------------------------------------------------------------------------------------------


def test_the_budget_is_never_exceeded_and_lists_are_cut_from_the_end():
    method, tasks, before = glfc(memory=8, **NONE), tasks_of(), [{}, {}, {}]
    most: list[int] = []
    federation = federation_of(method, tiny_context(), tasks)

    def after(done):
        for client in range(3):
            state = state_of_client(done, client)
            lists = {int(name[7:]): kept for name, kept in state.items() if name.startswith("images.")}
            assert sum(map(len, lists.values())) <= 8
            for column, own in before[client].items():
                share = 8 // len(lists)
                assert torch.equal(lists[column], own[:share])
            before[client] = lists
            most.append(sum(map(len, lists.values())))

    federation.run(after)
    assert federation.state.client_samples_kept == max(most)


@pytest.mark.slow
def test_exemplars_are_chosen_at_the_end_of_a_task_and_only_the_model_goes_down():
    federation = learnt(glfc(**NONE))
    body = sum(v.nbytes for name, v in model_of(federation).items() if name.startswith("body."))
    stage = [row for row in federation.state.ledger.uploads if row.stage == EXEMPLARS and row.labelled]
    assert {(row.task, row.client) for row in stage} == {
        (t, k) for t, sizes in enumerate(SIZES) for k, size in enumerate(sizes) if size
    }
    for row in stage:
        assert row.up_bytes == 0
        assert row.down_bytes == body + 4 * 2 * 33 * (row.task + 1) + 4 * (row.task + 1)
    assert not [row for row in learnt(glfc(memory=0, **NONE)).state.ledger.uploads if row.stage == EXEMPLARS]
    assert not [r for r in learnt(glfc(signal="entropy", **NONE)).state.ledger.uploads if r.stage == EXEMPLARS]


@pytest.mark.slow
def test_a_model_speaks_for_samples_and_exemplars(monkeypatch):
    told, update = [], GLFCClient.update

    def noted(self, client_data, broadcast, state):
        upload, after = update(self, client_data, broadcast, state)
        if broadcast.stage == "model":
            exemplars = sum(len(v) for name, v in after.items() if name.startswith("images."))
            told.append((upload.samples, len(client_data.labels), exemplars))
        return upload, after

    monkeypatch.setattr(GLFCClient, "update", noted)
    learnt(glfc(**NONE))
    assert all(samples == own + exemplars for samples, own, exemplars in told)
    assert any(exemplars for *_, exemplars in told)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_old_model_is_the_last_of_the_last_task_and_goes_down_once(monkeypatch):
    seen, ends = turns(monkeypatch), []
    federation = learnt(glfc(**NONE), after=lambda done: ends.append(model_of(done)))
    for turn in seen:
        task = turn["at"][0]
        assert (turn["old"] is None) == (task == 0)
        if task:
            assert same(turn["old"], ends[task - 1])
    rows = [row for row in federation.state.ledger.uploads if row.stage == "model" and row.labelled]
    body = sum(v.nbytes for name, v in ends[-1].items() if name.startswith("body."))
    head = 4 * 2 * 33
    for row in rows:
        model = body + head * (row.task + 1)
        once = body + head * row.task if row.task and not row.round else 0
        assert row.up_bytes == model + 8
        assert row.down_bytes == model + once + 16 + 4 * (row.task + 1)


@pytest.mark.slow_cases("boundary")
@pytest.mark.parametrize("signal", ["boundary", "entropy"])
def test_the_first_task_is_plain_training_with_binary_cross_entropy(signal, monkeypatch):
    """Whatever the memory, the signal and the proxy server."""
    one = SIZES[:1]
    methods = [
        glfc(signal=signal, memory=memory, proxy=proxy) for memory in (0, 8) for proxy in ("none", "reconstruct")
    ]
    ends = [model_of(learnt(method, one)) for method in methods]
    assert all(same(ends[0], other) for other in ends[1:])

    class Binary(Objective):
        def score_loss(self, scores, labels, inputs):
            targets = torch.nn.functional.one_hot(labels, scores.shape[1]).float()
            each = torch.nn.functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")
            return each.mean()

    monkeypatch.setattr(GLFCClient, "objective", lambda self, *_: Binary())
    assert same(ends[0], model_of(learnt(methods[0], one)))


# Resume, scarce labels, classes that come back ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", [glfc(), glfc(signal="entropy", rise=0.01)], ids=["b", "e"])
def test_classes_that_come_back_are_learnt_and_kept_once(method):
    first, second = image_tasks(np.random.default_rng(0), [4, 4], [[16, 12], [14, 10]])
    tasks = [first, [(samples, labels - 2) for samples, labels in second]]
    federation = learnt(method, tasks=tasks)
    assert federation.server.heads.sizes == [4, 2]
    assert all(torch.isfinite(value).all() for value in model_of(federation).values())
    state = state_of_client(federation, 0)
    kept = [name for name in state if name.startswith("images.")]
    if method.signal == "boundary":
        assert sorted(kept) == [f"images.{column}" for column in range(6)]
        assert sum(len(state[name]) for name in kept) == 6


@pytest.mark.slow
def test_a_client_without_a_label_takes_no_part():
    federation = federation_of(glfc(), tiny_context(), tasks_of(), unlabelled=[(0, 1), (2, 1)])
    federation.run(lambda _: None)
    assert state_of_client(federation, 1) == {}
    assert state_of_client(federation, 0)


# Knobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"loss_classes": "task"}, "method.loss_classes=task"),
        ({"trains": "features"}, "method.trains=features: method.proxy=reconstruct"),
    ],
    ids=str,
)
def test_knobs_that_contradict_each_other_are_told(knobs, told):
    with pytest.raises(UserError, match=told):
        glfc(**knobs)


@pytest.mark.parametrize(
    "knobs",
    [{"memory": -1}, {"signal": "loss"}, {"rise": 0}, {"proxy": "server"}, {"inversion": {"iterations": 0}}],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(GLFC, knobs, "method")
