"""Fed-CODA-Prompt: a client's rounds against a plain oracle, what trains and travels, and whole runs."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.coda_prompt import CodaPrompt, CodaPrompts
from fcl_bench.training.knobs import Training
from fcl_bench.typed import typed_instance
from tests.methods.coda_oracle import (
    COUNT,
    LAYERS,
    LENGTH,
    TASKS,
    Oracle,
    adam,
    assert_uploads,
    exchanges,
    lively_context,
    plain_training,
    recurring,
)
from tests.methods.plain_training import made_tasks
from tests.methods.training_harness import image_shard, tiny_context
from tests.methods.whole_runs import learnt, model_of, same


def coda(training: Training | None = None, **knobs) -> CodaPrompt:
    usual = {"layers": LAYERS, "components": COUNT, "length": LENGTH}
    return CodaPrompt(training or plain_training(), **{**usual, **knobs})


# Rounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("0.5")
@pytest.mark.parametrize("orthogonality", [0.0, 0.5])
def test_every_upload_is_that_of_the_oracle_and_the_server_averages_them(orthogonality):
    found = exchanges(coda(orthogonality=orthogonality), lively_context(), TASKS)
    assert [(task, client) for task, client, *_ in found] == [(0, 0), (0, 0), (1, 0), (1, 1), (1, 0), (1, 1)]
    moved = assert_uploads(Oracle(lively_context(), plain_training(), orthogonality), found, TASKS)
    assert moved > 0.01
    (_, _, _, first), (_, _, _, second), (_, _, after, _) = found[2:5]
    for name in first:
        torch.testing.assert_close(after[name], (6 * first[name] + 7 * second[name]) / 13, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_the_penalty_is_skipped_without_a_weight():
    runs = [model_of(learnt(coda(orthogonality=weight), lively_context(), TASKS)) for weight in (0.0, 0.0, 0.5)]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_only_the_last_tasks_group_and_head_have_gradients():
    method = coda(orthogonality=0.5)
    federation = learnt(method, lively_context(), TASKS)
    network = federation.server.network
    images, labels = TASKS[1][0]
    network.train()
    loss = torch.nn.functional.cross_entropy(network(images.float() / 127.5 - 1), labels) + network.body.prompts.penalty
    loss.backward()
    with_gradient = {name for name, value in network.named_parameters() if value.grad is not None}
    prompts = {f"body.prompts.{kind}.{layer}_1" for kind in "AKP" for layer in LAYERS}
    assert with_gradient == prompts | {"heads.1.weight", "heads.1.bias"}
    assert network.body.prompts.old() == {f"{kind}.{layer}_0" for kind in "AKP" for layer in LAYERS}


def test_old_groups_and_heads_stay_bit_for_bit_and_new_ones_are_orthogonal_to_them():
    found = exchanges(coda(adam()), lively_context(), TASKS)
    first_end = {name: value for _, _, down, _ in found[2:3] for name, value in down.items() if "_0" in name}
    last = found[-1][2]
    assert first_end
    assert all(torch.equal(last[name], value) for name, value in first_end.items())
    assert torch.equal(last["heads.0.weight"], found[2][2]["heads.0.weight"])
    for layer in LAYERS:
        for kind in "AKP":
            old, new = (found[2][2][f"body.prompts.{kind}.{layer}_{t}"].flatten(1) for t in (0, 1))
            assert float((new @ old.T).abs().max()) < 1e-5
            assert float((new @ new.T - torch.eye(COUNT)).abs().max()) < 1e-5


# Messages -------------------------------------------------------------------------------------------------------------


def floats(classes: int, dimension: int = 16) -> int:
    """Of a task: layers x components x (L + 2) d, and the head."""
    return len(LAYERS) * COUNT * (LENGTH + 2) * dimension + classes * (dimension + 1)


def test_a_round_sends_one_group_and_one_head_up_and_old_ones_down_once():
    method = coda(plain_training(rounds=3))
    rows = [row for row in learnt(method, lively_context(), TASKS).state.ledger.uploads if row.up_bytes]
    assert [(row.task, row.client) for row in rows] == [(0, 0)] * 3 + [(1, 0), (1, 1)] * 3
    assert {row.up_bytes for row in rows} == {4 * floats(2) + 8}
    # Per task and client. Beside the model: the round and its rate, and the heads' sizes.
    down: Counter[tuple[int, int]] = Counter()
    for row in rows:
        down[row.task, row.client] += row.down_bytes
    own, control = 4 * floats(2), 8 + 8
    assert down[0, 0] == 3 * (own + control + 4)
    # The client that was there has to hear how the first task ended, and the one that comes late all of it, too.
    assert down[1, 0] == down[1, 1] == 3 * (own + control + 8) + own


def test_the_papers_setting_sends_391690_floats_a_round():
    """d = 768, five layers, ten components of length 8, a head of ten classes."""
    method = CodaPrompt()
    prompts = method.prompts_class(method, 768)
    assert isinstance(prompts, CodaPrompts)
    assert (prompts.layers, method.training.optimizer, method.training.lr) == ((0, 1, 2, 3, 4), "adam", 1e-3)
    for seed in (0, 1):
        prompts.grow(seed)
    sent = sum(value.numel() for name, value in prompts.named_parameters() if name not in prompts.old())
    assert sent + 10 * 769 == 391_690


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_class_that_comes_back_trains_its_own_row_beside_new_prompts():
    """Rows of other classes of its head stay, as do the groups of its task."""
    tasks = recurring()
    found = exchanges(coda(adam()), lively_context(), tasks)
    second = [(down, up) for task, _, down, up in found if task == 1]
    names = {f"body.prompts.{kind}.{layer}_1" for kind in "AKP" for layer in LAYERS}
    heads = {f"heads.{head}.{own}" for head in (0, 1) for own in ("weight", "bias")}
    down, up = second[0]
    assert up.keys() == names | heads
    assert torch.equal(up["heads.0.weight"][0], down["heads.0.weight"][0])
    assert not torch.equal(up["heads.0.weight"][1], down["heads.0.weight"][1])
    # The third task has only old classes, so an empty head, and prompts of its own.
    last = found[-1][3]
    assert last["heads.2.weight"].shape == (0, 16)
    assert any(name.endswith("_2") and "prompts" in name for name in last)
    scores = learnt(coda(adam()), lively_context(), tasks).server.predict(tasks[2][0][0])
    assert scores.shape == (len(tasks[2][0][0]), 4)
    assert bool(torch.isfinite(scores).all())


def test_a_client_that_comes_late_learns_as_if_it_had_been_there():
    """Its model is all broadcast, so what the half that stands for it has seen before is no matter."""
    method, tasks = coda(adam()), TASKS
    found = exchanges(method, lively_context(), tasks)
    late = next((down, up) for task, client, down, up in found if (task, client) == (1, 1))
    fresh = method.client(lively_context())
    upload, state = fresh.update(image_shard(1, 1, *tasks[1][1]), late[0], {})
    assert same(dict(upload), dict(late[1]))
    assert state == {}


@pytest.mark.parametrize("unlabelled", [[(1, 1)], [(1, 0), (1, 1)]], ids=["one", "all"])
def test_clients_without_a_label_change_nothing(unlabelled):
    run = learnt(coda(adam()), lively_context(), TASKS, unlabelled=unlabelled)
    assert all(bool(torch.isfinite(value).all()) for value in model_of(run).values())
    if len(unlabelled) == 2:
        alone = learnt(coda(adam()), lively_context(), TASKS[:1])
        kept = model_of(run)
        assert all(torch.equal(kept[name], value) for name, value in model_of(alone).items())


@pytest.mark.slow
def test_seeds_and_wires():
    one, two, other = (model_of(learnt(coda(adam()), lively_context(seed), TASKS)) for seed in (0, 0, 1))
    assert same(one, two)
    assert not any(torch.equal(one[name], other[name]) for name in one if "prompts" in name)
    found = exchanges(coda(adam(precision="bfloat16")), lively_context(wire="bfloat16"), TASKS)
    # Beside half the bytes, a scale for each column of a matrix, and for each number of a prompt's rows.
    scales = len(LAYERS) * (LENGTH + 2) * 16 + 16
    assert {up.nbytes for *_, up in found} == {2 * (floats(2) - 2) + 4 * (scales + 2) + 8}


@pytest.mark.slow
def test_it_learns_what_one_task_brings():
    tasks = made_tasks([[24, 24]], classes=3)
    method = coda(Training(optimizer="adam", lr=0.02, rounds=3, epochs=3, batch_size=8, augment="none"))
    run = learnt(method, lively_context(width=4), tasks)
    answers = torch.cat([run.server.predict(images).argmax(dim=1) for images, _ in tasks[0]])
    labels = torch.cat([labels for _, labels in tasks[0]])
    assert np.mean((answers == labels).numpy()) > 0.8


# Knobs ----------------------------------------------------------------------------------------------------------------


def test_impossible_knobs_are_refused_in_a_line():
    with pytest.raises(UserError, match=r"method\.length=7 is odd.* \(method\.length=8\)"):
        coda(length=7)
    for layers in ([], [4], [1, 1]):
        with pytest.raises(UserError, match=r"method\.layers=.*distinct numbers from 0 to 3"):
            coda(layers=layers).check(lively_context(), [2, 2])
    with pytest.raises(UserError, match=r"method\.trains=features: method=coda_prompt trains a part"):
        coda(trains="features").check(lively_context(), [2])
    with pytest.raises(UserError, match="method=coda_prompt works inside a vision transformer"):
        coda().check(tiny_context(), [2])
    for name, value in (("components", 0), ("orthogonality", -1), ("layers", [-1])):
        with pytest.raises(UserError, match=rf"^method\.{name}"):
            typed_instance(CodaPrompt, {name: value}, "method")


def test_more_components_than_dimensions_run():
    run = learnt(dataclasses.replace(coda(adam()), components=10), lively_context(), TASKS)
    assert all(bool(torch.isfinite(value).all()) for value in model_of(run).values())
