"""Fed-L2P: a round against autograd in float64 on a naive ViT, a pool that trains in every task, bytes, limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.l2p import L2P
from fcl_bench.typed import typed_instance
from tests.methods.harness import turn
from tests.methods.prompt_harness import D, context, exchanges, heads_alone, pictures, run_of, training
from tests.methods.training_harness import image_shard, images_stream, learn_images, tiny_context
from tests.methods.whole_runs import model_of, same
from tests.training.vit.prompt_oracle import naive_features


def small(**knobs) -> L2P:
    """With a pool of 5 prompts of 4 rows in one layer, of which an image takes 2."""
    chosen = {"pool": 5, "length": 4, "top": 2, **knobs}
    return L2P(chosen.pop("training", training()), **chosen)


@pytest.mark.slow_cases("published")
@pytest.mark.parametrize("variant", ["working", "published"])
def test_a_step_is_that_of_the_equations(variant):
    """One step of SGD on one batch of the second task, deep; published: every image draws everyone's keys."""
    rate, pull, tasks, given = 0.5, 0.3, pictures(), context()
    knobs = training(optimizer="sgd", lr=rate, batch_size=32, momentum=0.0)
    method = small(training=knobs, pull=pull, variant=variant, layers=[0, 2])
    server = learn_images(method, given, tasks[:1])
    task = images_stream(tasks)[1]
    server.start_task(task)
    before = {name: value.clone() for name, value in server.network.state().items()}
    client, client_data = method.client(given), image_shard(0, 1, *tasks[1][0])
    upload = turn(client, client_data, server.broadcast(task, 0))

    names = {"P": "body.prompts.P", "K": "body.prompts.K", "weight": "heads.1.weight", "bias": "heads.1.bias"}
    values = {kind: before[name].double().requires_grad_() for kind, name in names.items()}
    vit = tiny_context(width=2, architecture="vit").network.build()
    images = client.trainer.standardise(client_data.inputs)
    queries = naive_features(vit, images, {}).detach()
    rows, away = {}, 0.0
    for i, layer in enumerate((0, 2)):
        near = [[q @ k / q.norm() / k.norm() for k in values["K"][i]] for q in queries]
        chosen = [np.argsort([-float(c.detach()) for c in of])[:2].tolist() for of in near]
        halves = [[values["P"][i, m, part] for part in (slice(2), slice(2, 4)) for m in ms] for ms in chosen]
        rows[layer] = torch.stack([torch.cat(parts) for parts in halves])
        for x in range(len(queries)):
            for other in range(len(queries)) if variant == "published" else [x]:
                away = away + sum(1 - near[x][m] for m in chosen[other])
    logits = naive_features(vit, images, rows) @ values["weight"].T + values["bias"]
    logs = logits - logits.exp().sum(dim=1, keepdim=True).log()
    loss = -sum(logs[i, int(label) - 3] for i, label in enumerate(client_data.labels)) / len(images)
    (loss + pull * away).backward()

    assert set(upload) == set(names.values())
    for kind, name in names.items():
        stepped = values[kind].detach() - rate * values[kind].grad
        torch.testing.assert_close(upload[name].double(), stepped, atol=5e-6, rtol=1e-5)
        assert float(values[kind].grad.abs().max()) > 1e-4


@pytest.mark.slow
def test_the_published_pull_is_another_one():
    pulls = {
        variant: model_of(run_of(small(variant=variant, training=training(optimizer="sgd", lr=0.01))))
        for variant in ("working", "published")
    }
    assert not same(pulls["working"], pulls["published"])


def test_the_pool_trains_in_every_task_and_old_heads_rest():
    found: list[dict[str, torch.Tensor]] = []
    learn_images(
        small(),
        context(),
        pictures(),
        after=lambda _, server: found.append({n: v.clone() for n, v in server.network.state().items()}),
    )
    for earlier, later in itertools.pairwise(found):
        for name in ("body.prompts.P", "body.prompts.K"):
            assert not torch.equal(earlier[name], later[name])
        for name in earlier:
            assert not name.startswith("heads.") or torch.equal(earlier[name], later[name])


@pytest.mark.parametrize("layers", [[0], [0, 1, 2]], ids=str)
def test_bytes_are_those_of_the_formula(layers):
    """Up the whole pool and the task's head; down besides them, once to each client, heads of old tasks."""
    classes, pool = [3, 2, 2], len(layers) * 5 * (4 * D + D)
    known: dict[int, set[int]] = {}
    for row in exchanges(run_of(small(layers=layers))):
        missing = set(range(row.task)) - known.setdefault(row.client, set())
        known[row.client] |= missing
        part = 4 * (pool + classes[row.task] * (D + 1))
        assert row.up_bytes == part + 8
        assert row.down_bytes == part + 4 * sum(classes[t] * (D + 1) for t in missing) + 16 + 4 * (row.task + 1)


@pytest.mark.slow
def test_without_rows_only_the_heads_train_bit_for_bit_and_byte_for_byte():
    ours, theirs = run_of(small(length=0)), run_of(heads_alone())
    assert same(model_of(ours), model_of(theirs))
    assert exchanges(ours) == exchanges(theirs)


@pytest.mark.slow
def test_without_pull_keys_stay_as_they_are_drawn():
    start = small().server(context())
    start.start_task(images_stream(pictures())[0])
    drawn = start.network.state()["body.prompts.K"]
    assert torch.equal(model_of(run_of(small(pull=0.0)))["body.prompts.K"], drawn)
    assert not torch.equal(model_of(run_of(small()))["body.prompts.K"], drawn)


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"length": 3}, r"method\.length=3 is odd"),
        ({"top": 6, "pool": 5}, r"method\.top=6 of a pool of 5"),
        ({"variant": "paper"}, r"method\.variant=paper"),
        ({"pool": 0}, r"method\.pool=0"),
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs, told):
    with pytest.raises(UserError, match=told):
        typed_instance(L2P, knobs, "method")


def test_layers_that_the_network_does_not_have_are_refused():
    with pytest.raises(UserError, match=r"method\.layers=\[0, 4\] for a network of 4 blocks"):
        L2P(layers=[0, 4]).check(context(), [2, 2])
    L2P().check(context(), [2, 2])
