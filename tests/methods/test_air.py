"""AIR and logit adjustment against the oracles, their limits, and what is sent."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.engine.validation import BadUpload
from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.air import AIR
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.protocol.context import Task
from fcl_bench.typed import typed_instance
from tests.methods import air_oracle as oracle
from tests.methods.harness import (
    context_of,
    dealt,
    draw_tasks,
    learn,
    learn_task,
    on_wire,
    projection_of,
    random_tasks,
    relative_error,
    shard_of,
    stream_of,
    take_in,
    turn,
)
from tests.methods.test_recurring_classes import blurred_tasks
from tests.small_runs import run_in


def tasks_of_sizes(sizes: list[list[int]], seed: int = 0):
    """Per task, classes of these sizes, in a random order at two clients."""
    rng, first, tasks = np.random.default_rng(seed), 0, []
    for counts in sizes:
        labels = rng.permutation(np.repeat(first + np.arange(len(counts)), counts))
        centres = rng.standard_normal((first + len(counts), 8))
        Z = centres[labels] + rng.standard_normal((len(labels), 8))
        cut = len(labels) // 3
        tasks.append([(Z[:cut], labels[:cut]), (Z[cut:], labels[cut:])])
        first += len(counts)
    return tasks


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("M", [None, 20, 150])
@pytest.mark.parametrize("seed", range(3))
def test_weights_agree_with_the_oracle(seed, M, normalise):
    tasks = random_tasks(seed, 12)
    method = AIR(M=M, gamma=0.3, normalise=normalise)
    server, classifiers = learn(method, context_of(8, seed), tasks)
    P = projection_of(server)
    for ours, theirs in zip(classifiers, oracle.weighted(tasks, P, 0.3, normalise), strict=True):
        assert relative_error(ours, theirs) < 1e-9
    if not normalise:  # no class comes back, so that is the paper's form
        H, labels, _ = oracle.pooled(tasks, P)
        assert relative_error(classifiers[-1], oracle.printed(H, labels, 0.3)) < 1e-8


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 100),
    beta=st.sampled_from([0.05, 0.5, 100]),
    correction=st.sampled_from(["weights", "logits"]),
)
def test_any_partition_and_order_gives_the_classifier_of_one_client(seed, clients, beta, correction):
    rng = np.random.default_rng(seed)
    tasks, method = draw_tasks(rng, 5, [3, 2], [[60], [50]]), AIR(M=12, gamma=2.0, correction=correction)
    parted, classifiers = learn(method, context_of(5), dealt(rng, tasks, clients, beta))
    central, expected = learn(method, context_of(5), tasks)
    for ours, theirs in zip(classifiers, expected, strict=True):
        assert relative_error(ours, theirs.numpy()) < 1e-9
    assert torch.equal(parted.state_dict()["counts"], central.state_dict()["counts"])
    if correction == "logits":
        assert torch.equal(parted.model()["bias"], central.model()["bias"])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_class_that_comes_back_is_weighed_by_its_samples_so_far(seed, normalise):
    tasks, _, _ = blurred_tasks(np.random.default_rng(seed))
    assert any(set(task.columns) - set(task.new_columns) for task in stream_of(tasks))
    server, classifiers = learn(AIR(M=20, gamma=3.0, normalise=normalise), context_of(8), tasks)
    for ours, theirs in zip(classifiers, oracle.weighted(tasks, projection_of(server), 3.0, normalise), strict=True):
        assert relative_error(ours, theirs) < 1e-9


def test_the_hand_value():
    """Three samples (1, 0) of one class and one (0, 1) of another."""
    Z, labels = np.array([[1.0, 0], [1, 0], [1, 0], [0, 1]]), np.array([0, 0, 0, 1])
    _, [W] = learn(AIR(M=None, gamma=0.25, normalise=False), context_of(2), [[(Z, labels)]])
    assert relative_error(W, 0.8 * np.eye(2)) < 1e-12
    _, [W] = learn(AIR(M=None, gamma=0.25), context_of(2), [[(Z, labels)]])
    assert relative_error(W, np.eye(2) / (1 + 0.25 * (1 / 3 + 1) / 2)) < 1e-12
    server, [W] = learn(AIR(M=None, gamma=0.25, correction="logits", tau=0.5), context_of(2), [[(Z, labels)]])
    assert relative_error(W, np.diag([12 / 13, 0.8])) < 1e-12
    scores = server.predict(torch.eye(2, dtype=torch.float64))
    assert relative_error(scores, np.diag([12 / 13, 0.8]) + 0.5 * np.log([4 / 3, 4])) < 1e-12


def test_classes_of_equal_size_make_weights_stsa():
    """With the same ridge if the weights have mean 1; else with n times it. Chosen by `auto`, either way."""
    tasks = tasks_of_sizes([[20, 20, 20], [20, 20]])
    for gamma, air in ((3.0, AIR(M=30, gamma=3.0)), (60.0, AIR(M=30, gamma=3.0, normalise=False))):
        _, ours = learn(air, context_of(8), tasks)
        _, theirs = learn(STSA(M=30, gamma=gamma), context_of(8), tasks)
        for W, expected in zip(ours, theirs, strict=True):
            assert relative_error(W, expected.numpy()) < 1e-10
    for chosen in ("auto", "gcv"):
        server, [_, W] = learn(AIR(M=30, gamma=chosen), context_of(8), tasks)
        stsa, [_, expected] = learn(STSA(M=30, gamma=chosen), context_of(8), tasks)
        assert relative_error(W, expected.numpy()) < 1e-10
        assert server.report()["ridge"] == pytest.approx(stsa.report()["ridge"] / 20, rel=1e-10)


def test_more_copies_of_a_classs_samples_change_nothing_with_weights():
    """What the correction is for: STSA's classifier does change."""
    [task] = tasks_of_sizes([[12, 7, 9]])
    copied = [(np.concatenate([Z, *[Z[y == 1]] * 5]), np.concatenate([y, *[y[y == 1]] * 5])) for Z, y in task]
    for method, same in ((AIR(M=30, gamma=0.5, normalise=False), True), (STSA(M=30, gamma=0.5), False)):
        classifiers = [learn(method, context_of(8), [clients])[1][0] for clients in (task, copied)]
        assert (relative_error(classifiers[0], classifiers[1].numpy()) < 1e-10) is same


@pytest.mark.parametrize("M", [None, 30])
def test_logits_are_stsas_scores_adjusted_by_all_counts_so_far(M):
    tasks, Z, labels = blurred_tasks(np.random.default_rng(4))
    server, classifiers = learn(AIR(M=M, gamma=3.0, correction="logits", tau=0.7), context_of(8), tasks)
    stsa, expected = learn(STSA(M=M, gamma=3.0), context_of(8), tasks)
    assert all(torch.equal(a, b) for a, b in zip(classifiers, expected, strict=True))
    inputs = torch.from_numpy(Z[:30])
    theirs = oracle.adjusted(stsa.predict(inputs).numpy(), np.bincount(labels), 0.7)
    assert relative_error(server.predict(inputs), theirs) < 1e-12
    # The written model says the same.
    model, P = server.model(), projection_of(server)
    H = Z[:30] if P is None else np.maximum(Z[:30] @ P, 0)
    assert relative_error(server.predict(inputs), H @ model["W"].numpy() + model["bias"].numpy()) < 1e-12


def test_without_strength_logits_are_stsa_to_the_bit():
    tasks = random_tasks(1, 12)
    server, _ = learn(AIR(M=30, correction="logits", tau=0.0), context_of(8), tasks)
    stsa, _ = learn(STSA(M=30), context_of(8), tasks)
    assert "bias" not in server.model()
    inputs = torch.from_numpy(tasks[0][0][0])
    assert torch.equal(server.predict(inputs), stsa.predict(inputs))


def test_scaled_scores_scale_the_adjustment_too():
    tasks = tasks_of_sizes([[30, 5, 12]])
    knobs = {"M": 30, "gamma": 3.0, "correction": "logits"}
    plain, _ = learn(AIR(**knobs), context_of(8), tasks)
    scaled, _ = learn(AIR(**knobs, scale_scores=True), context_of(8), tasks)
    inputs = torch.from_numpy(tasks[0][0][0])
    own = (plain.B * plain.W).sum(dim=0)
    assert relative_error(scaled.predict(inputs), (plain.predict(inputs) / own.sqrt()).numpy()) < 1e-12


@pytest.mark.parametrize("correction", ["weights", "logits"])
def test_gcv_is_that_of_the_weighted_samples(correction):
    tasks, _, _ = blurred_tasks(np.random.default_rng(1))
    server, _ = learn(AIR(M=12, gamma="gcv", correction=correction), context_of(8), tasks)
    H, labels, when = oracle.pooled(tasks, projection_of(server))
    pi = oracle.sample_weights(labels, when) if correction == "weights" else np.ones(len(labels))
    mean = np.sum(pi[:, None] * H**2) / H.shape[1]
    ridges = mean * 10.0 ** (np.arange(-32, 17) / 4)
    best = ridges[np.argmin(oracle.gcv_scores(H, np.eye(1 + labels.max())[labels], pi, ridges))]
    assert server.report()["ridge"] == pytest.approx(best, rel=1e-9)


def test_a_rare_class_is_found_more_often():
    rng = np.random.default_rng(3)
    centres = 0.9 * rng.standard_normal((4, 8))
    labels = np.repeat(np.arange(4), [400, 150, 60, 15])
    train = [[(centres[labels] + rng.standard_normal((len(labels), 8)), labels)]]
    truth = np.repeat(np.arange(4), 200)
    tests = torch.from_numpy(centres[truth] + rng.standard_normal((len(truth), 8)))
    recall = {}
    methods = {"stsa": STSA(gamma=1.0), "weights": AIR(gamma=1.0), "logits": AIR(gamma=1.0, correction="logits")}
    for name, method in methods.items():
        server, _ = learn(type(method)(**{**vars(method), "M": 60}), context_of(8), train)
        right = server.predict(tests).argmax(dim=1).numpy() == truth
        recall[name] = right[truth == 3].mean(), right.mean()
    for name in ("weights", "logits"):
        assert recall[name][0] > recall["stsa"][0] + 0.1
        assert recall[name][1] > recall["stsa"][1]


@pytest.mark.parametrize("correction", ["weights", "logits"])
def test_a_class_without_a_labelled_sample_is_not_lifted(correction):
    """Column 1 is a class of whose samples nobody has the label."""
    rng = np.random.default_rng(0)
    Z, labels = np.abs(rng.standard_normal((20, 8))), rng.choice([0, 2], 20)
    method, context = AIR(M=20, gamma=1.0, correction=correction), context_of(8)
    server = method.server(context)
    learn_task(method, context, server, Task(0, range(3), 3), [(Z, labels)])
    scores = server.predict(torch.from_numpy(Z))
    assert torch.isfinite(scores).all()
    assert (scores[:, 1] == 0).all()
    assert not (scores.argmax(dim=1) == 1).any()


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("gram", ["full", "packed"])
def test_coarser_wires_change_little(wire, gram):
    tasks = tasks_of_sizes([[400, 20, 3]])
    _, [exact] = learn(AIR(M=20, gamma=30.0), context_of(8), tasks)
    _, [ours] = learn(AIR(M=20, gamma=30.0), context_of(8, wire=wire, gram=gram, columns="held"), tasks)
    assert relative_error(ours, exact.numpy()) < {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-2}[wire]


@pytest.mark.parametrize("gamma", [2.0, "gcv"])
def test_bytes(gamma):
    """By formula; a ridge by gcv needs nothing more."""
    M, c = 20, 3
    tasks = tasks_of_sizes([[9, 7, 8], [5, 5, 5]])
    first = stream_of(tasks)[0]
    client_data = shard_of(0, 0, *tasks[0][0])
    for gram, size in (("full", M * M), ("packed", M * (M + 1) // 2)):
        context = context_of(8, wire="float32", gram=gram)
        for correction, down, up in (
            ("weights", [4 * c, 8 + 8 * c], [4 * c, 4 * (size + M * c)]),
            ("logits", [8 + 4 * c], [4 * (size + M * c) + 4 * c]),
        ):
            method = AIR(M=M, gamma=gamma, correction=correction)
            server, client = method.server(context), method.client(context)
            server.start_task(first)
            assert server.rounds(first) == len(up)
            for round_ in range(len(up)):
                broadcast = server.broadcast(first, round_)
                sent = on_wire(turn(client, client_data, broadcast, round_=round_), method, context)
                assert (broadcast.nbytes, sent.nbytes) == (down[round_], up[round_])
                take_in(server, 0, sent, first, round_)


def test_uploads_that_contradict_the_counts_are_refused():
    tasks, context = tasks_of_sizes([[9, 7]]), context_of(8)
    Z, labels = tasks[0][1]
    task = Task(0, range(3), 3)
    for correction in ("weights", "logits"):
        method = AIR(M=20, correction=correction)
        server, client = method.server(context), method.client(context)
        server.start_task(task)
        for round_ in range(server.rounds(task)):
            upload = turn(client, shard_of(1, 0, Z, labels), server.broadcast(task, round_))
            take_in(server, 1, upload, task, round_)
        wrong = upload["C"].clone()
        wrong[:, 2] = 1  # a class of which there is no sample
        with pytest.raises(BadUpload, match="class sums are not zero, and by the counts|C has 1 columns of no sample"):
            take_in(server, 1, upload.with_tensors({**upload, "C": wrong}), task, server.rounds(task) - 1)
        bad = upload.with_tensors({**upload, "n": torch.full((3,), -1, dtype=torch.int32)})
        with pytest.raises(BadUpload, match="n holds -1|n is no field of this upload"):
            take_in(server, 1, bad, task, server.rounds(task) - 1)


def test_impossible_knobs_are_refused():
    for knob, value, told in (
        ("correction", "prior", r"method\.correction=prior is not known"),
        ("tau", -0.1, r"method\.tau=-0\.1 is out of range"),
        ("gamma", -1, r"method\.gamma=-1\.0 is out of range"),
    ):
        with pytest.raises(UserError, match=told):
            typed_instance(AIR, {knob: value}, "method")


@pytest.mark.parametrize("correction", ["weights", "logits"])
def test_a_run_on_an_imbalanced_stream_counts_each_stage(correction, tmp_path):
    overrides = (
        "data=digits",
        "split.imbalance=0.1",
        "split=class_overlap",
        "tasks=3",
        "label_rate=0.5",
        "wire.dtype=float16",
    )
    outcome = run_in(tmp_path, "method=air", "method.M=16", f"method.correction={correction}", *overrides)
    uploads = pd.read_csv(outcome.folder / "uploads.csv")
    sent = uploads[uploads["up_bytes"] > 0]
    tasks = pd.read_csv(outcome.folder / "tasks.csv")
    c = sent["task"].map(tasks["classes"])
    statistics = 2 * 16 * (16 + c) + 4 * (16 + c)  # float16 with a float32 scale per column
    if correction == "weights":
        assert set(sent["stage"]) == {"counts", "statistics"}
        expected = np.where(sent["stage"] == "counts", 4 * c, statistics)
    else:
        expected = statistics + 4 * c
    np.testing.assert_array_equal(sent["up_bytes"], expected)
    values = sum(16 * (16 + classes) + classes for classes in tasks["classes"])
    assert outcome.record["communication"]["accounting"]["stsa_mib"] == 4 * values / 2**20
