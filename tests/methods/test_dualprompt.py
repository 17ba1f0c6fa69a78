"""Fed-DualPrompt: a round against autograd in float64 on a naive ViT, what rests, bytes, limits, interruptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.dualprompt import DualPrompt
from fcl_bench.training.network import Heads
from fcl_bench.typed import typed_instance
from tests.methods.harness import turn
from tests.methods.prompt_harness import (
    SIZES,
    D,
    context,
    digest,
    exchanges,
    heads_alone,
    pictures,
    run_of,
    training,
)
from tests.methods.training_harness import image_shard, images_stream, learn_images, tiny_context
from tests.methods.whole_runs import model_of, same
from tests.training.vit.prompt_oracle import naive_features


def small(**knobs) -> DualPrompt:
    """With a general prompt of 2 layers x 4 rows and, of each task, one of 2 layers x 6 rows."""
    chosen = {"e_layers": [2, 3], "g_length": 4, "e_length": 6, **knobs}
    return DualPrompt(chosen.pop("training", training()), **chosen)


def second_task(method: DualPrompt, tasks=None, client: int = 0):
    """A server and a client's half at the second task, with the client's shard and the first broadcast."""
    tasks, given = tasks or pictures(), context()
    server = learn_images(method, given, tasks[:1])
    server.start_task(images_stream(tasks)[1])
    return (
        server,
        method.client(given),
        image_shard(client, 1, *tasks[1][client]),
        server.broadcast(server_task(tasks), 0),
    )


def server_task(tasks):
    return images_stream(tasks)[1]


# Against the equations ------------------------------------------------------------------------------------------------


def test_a_step_is_that_of_the_equations():
    """One step of SGD on one batch of the second task: W - lr grad of CE over its classes + pull (1 - cos)."""
    rate, pull = 0.5, 0.3
    knobs = training(optimizer="sgd", lr=rate, batch_size=32, momentum=0.0)
    method = small(training=knobs, pull=pull)
    server, client, client_data, broadcast = second_task(method)
    before = {name: value.clone() for name, value in server.network.state().items()}
    upload = turn(client, client_data, broadcast)

    names = {kind: f"body.prompts.{kind}" for kind in ("G", "E.1", "K.1")} | {
        kind: f"heads.1.{kind}" for kind in ("weight", "bias")
    }
    values = {kind: before[name].double().requires_grad_() for kind, name in names.items()}
    vit = tiny_context(width=2, architecture="vit").network.build()
    images = client.trainer.standardise(client_data.inputs)
    queries = naive_features(vit, images, {}).detach()
    rows = {layer: values["G"][layer].expand(len(images), -1, -1) for layer in (0, 1)}
    rows |= {layer: values["E.1"][layer - 2].expand(len(images), -1, -1) for layer in (2, 3)}
    logits = naive_features(vit, images, rows) @ values["weight"].T + values["bias"]
    logs = logits - logits.exp().sum(dim=1, keepdim=True).log()
    loss = -sum(logs[i, int(label) - 3] for i, label in enumerate(client_data.labels)) / len(images)
    cosines = [q @ k / q.norm() / k.norm() for q in queries for k in values["K.1"]]
    away = sum(1 - cosine for cosine in cosines)
    (loss + pull * away).backward()

    assert set(upload) == set(names.values())
    for kind, name in names.items():
        stepped = values[kind].detach() - rate * values[kind].grad
        torch.testing.assert_close(upload[name].double(), stepped, atol=2e-6, rtol=1e-5)
        assert float(values[kind].grad.abs().max()) > 1e-4


@pytest.mark.slow
def test_a_test_sample_takes_the_nearest_tasks_prompts_and_all_classes_compete():
    method = small(training=training(rounds=3, lr=0.05))
    server = learn_images(method, context(), pictures())
    images = torch.cat([images for clients in pictures() for images, _ in clients])
    state = server.network.state()
    vit = tiny_context(width=2, architecture="vit").network.build()
    standard = server.trainer.standardise(images)
    queries = naive_features(vit, standard, {}).detach()
    keys = torch.stack([state[f"body.prompts.K.{task}"].double() for task in range(3)])
    experts = torch.stack([state[f"body.prompts.E.{task}"].double() for task in range(3)])
    rows = {layer: state["body.prompts.G"][layer].double().expand(len(images), -1, -1) for layer in (0, 1)}
    seen = set()
    for i, layer in enumerate((2, 3)):
        near = (queries / queries.norm(dim=1, keepdim=True)) @ (keys[:, i] / keys[:, i].norm(dim=1, keepdim=True)).T
        rows[layer] = experts[near.argmax(dim=1), i]
        seen |= set(near.argmax(dim=1).tolist())
    features = naive_features(vit, standard, rows)
    weight = torch.cat([state[f"heads.{task}.weight"].double() for task in range(3)])
    bias = torch.cat([state[f"heads.{task}.bias"].double() for task in range(3)])
    scores = server.predict(images)
    assert scores.shape == (len(images), 7)
    torch.testing.assert_close(scores.double(), features @ weight.T + bias, atol=1e-5, rtol=1e-5)
    assert len(seen) > 1
    # A sample's scores do not depend on those beside it.
    torch.testing.assert_close(server.predict(images[5:6]), scores[5:6], atol=1e-5, rtol=1e-5)


# What rests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurring", [False, True])
def test_old_tasks_prompts_keys_and_heads_keep_their_bytes(recurring):
    kept: list[dict[str, str]] = []
    learn_images(
        small(),
        context(),
        pictures(recurring=recurring),
        after=lambda _, server: kept.append({n: digest(v) for n, v in server.network.state().items()}),
    )
    for task in range(2):
        own = {f"body.prompts.E.{task}", f"body.prompts.K.{task}"}
        # A class that comes back is learnt by the head that has it.
        own |= set() if recurring else {f"heads.{task}.weight", f"heads.{task}.bias"}
        for later in kept[task + 1 :]:
            assert {name: later[name] for name in own} == {name: kept[task][name] for name in own}
            assert later["body.prompts.G"] != kept[task]["body.prompts.G"]
    # Nothing of the ViT is in the model's state: everyone has it.
    assert {name.split(".")[0] + "." + name.split(".")[1] for name in kept[-1]} == {
        "body.prompts",
        *(f"heads.{task}" for task in range(3)),
    }


@pytest.mark.slow
def test_without_pull_keys_stay_as_they_are_drawn_and_nothing_else_differs():
    """Queries do not depend on prompts, and no prompt's gradient on the keys."""
    pulled, free = (model_of(run_of(small(pull=pull))) for pull in (1.0, 0.0))
    start = small().server(context())
    for task in images_stream(pictures()):
        start.start_task(task)
    drawn = start.network.state()
    for name in pulled:
        if ".K." in name:
            assert torch.equal(free[name], drawn[name])
            assert not torch.equal(pulled[name], drawn[name])
        else:
            assert torch.equal(pulled[name], free[name])


@pytest.mark.slow
def test_under_adam_the_pull_does_not_count_where_batches_have_one_size():
    """Its steps do not depend on the gradient's length, and nothing else pulls at the keys."""
    whole = training(batch_size=32)
    keys = [
        {name: value for name, value in model_of(run_of(small(training=whole, **knobs))).items() if ".K." in name}
        for knobs in ({}, {"pull": 0.3})
    ]
    for name in keys[0]:
        torch.testing.assert_close(keys[0][name], keys[1][name], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_without_prompts_only_the_heads_train_bit_for_bit_and_byte_for_byte():
    knobs = {"fraction": 0.7, "rounds": 2}
    ours = run_of(small(training=training(**knobs), g_length=0, e_length=0))
    theirs = run_of(heads_alone(**knobs))
    assert same(model_of(ours), model_of(theirs))
    assert exchanges(ours) == exchanges(theirs)
    assert (ours.state.answers["correct"] == theirs.state.answers["correct"]).all()
    other = model_of(run_of(small(training=training(**knobs), g_length=0)))
    assert not same({name: other[name] for name in model_of(theirs)}, model_of(theirs))


def test_a_client_with_a_single_sample_trains_the_tasks_own_prompt():
    tasks = pictures()
    tasks[1][0] = tuple(part[:1] for part in tasks[1][0])
    server, client, client_data, broadcast = second_task(small(), tasks)
    server.network.body.prompts.K[0].data.copy_(
        server.network.body.queries(client.trainer.standardise(client_data.inputs))
    )
    upload = turn(client, client_data, server.broadcast(server_task(tasks), 0))
    for kind in "EK":
        name = f"body.prompts.{kind}.1"
        assert not torch.equal(upload[name], broadcast[name])


# Messages -------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_formula():
    """Up G + E_t + K_t + head; down besides them, once to each client, the parts of old tasks, and 16 bytes + sizes."""
    found = run_of(small())
    classes = [3, 2, 2]
    general = 2 * 4 * D
    own = [2 * 6 * D + 2 * D + c * (D + 1) for c in classes]
    known: dict[int, set[int]] = {}
    for row in exchanges(found):
        missing = set(range(row.task)) - known.setdefault(row.client, set())
        known[row.client] |= missing
        training_part = 4 * (general + own[row.task])
        assert row.up_bytes == training_part + 8
        assert row.down_bytes == training_part + 4 * sum(own[task] for task in missing) + 16 + 4 * (row.task + 1)
    assert known == {0: {0, 1}, 1: {0, 1}, 2: {0, 1}}
    assert len(exchanges(found)) == 2 * sum(size > 0 for sizes in SIZES for size in sizes)


def test_clients_keep_what_no_longer_changes_of_what_they_received():
    """The prompts, keys and heads of the first two tasks, which the third sends to no client that has them."""
    found = run_of(small())
    changes = found.server.network.changing()
    stays = [value for name, value in found.server.network.state().items() if name not in changes]
    assert found.state.client_storage_bytes == {"received": sum(value.nbytes for value in stays)}


# Interruptions, seeds, knobs ------------------------------------------------------------------------------------------


def test_new_prompts_follow_from_the_runs_seed():
    def start(seed):
        server = small().server(context(seed=seed))
        for task in images_stream(pictures()):
            server.start_task(task)
        return server.network.state()

    assert same(start(0), start(0))
    for name in ("body.prompts.G", "body.prompts.E.1", "body.prompts.K.2"):
        assert not torch.equal(start(0)[name], start(1)[name])


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"g_length": 5}, r"method\.g_length=5 is odd"),
        ({"e_length": 7}, r"method\.e_length=7 is odd"),
        ({"g_layers": [0, 2]}, r"method\.g_layers and method\.e_layers both have \[2\]"),
        ({"pull": -1.0}, r"method\.pull=-1\.0"),
        ({"g_layers": [-1]}, r"method\.g_layers"),
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs, told):
    with pytest.raises(UserError, match=told):
        typed_instance(DualPrompt, {"e_layers": [2, 3], **knobs}, "method")


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({}, r"method\.e_layers=\[2, 3, 4\] for a network of 4 blocks \(distinct numbers from 0 to 3\)"),
        ({"e_layers": []}, r"method\.e_layers=\[\] "),
        ({"e_layers": [3, 3]}, r"method\.e_layers=\[3, 3\] "),
        ({"e_layers": [2], "trains": "features"}, r"method\.trains=features"),
    ],
    ids=str,
)
def test_what_the_network_does_not_have_is_refused_in_a_line(knobs, told):
    with pytest.raises(UserError, match=told) as refused:
        DualPrompt(**knobs).check(context(), [2, 2])
    assert "\n" not in str(refused.value)
    small().check(context(), [2, 2])


def test_the_heads_message_is_the_only_thing_beside_the_model():
    server, _, _, broadcast = second_task(small())
    beside = set(broadcast) - set(server.network.state())
    assert beside == {"round", "rate", *Heads(((0, 1, 2), (3, 4)), (3, 4)).to_message()}
    assert np.isclose(float(broadcast["rate"]), 0.01)
