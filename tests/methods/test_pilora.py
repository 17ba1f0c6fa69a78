"""PILoRA: what is sent, what stays, how it predicts, and whole runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import Chain
from fcl_bench.engine.exchange import Arrival
from fcl_bench.engine.validation import validate_upload
from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.low_rank import low_rank_layers
from fcl_bench.methods.transformers.pilora import MEANS, PRESENT, PILoRA
from fcl_bench.typed import typed_instance
from tests.methods.harness import turn
from tests.methods.pilora_harness import CLASSES, D, R, context, pictures, pilora
from tests.methods.training_harness import (
    image_shard,
    image_tasks,
    images_stream,
    learn_images,
    tiny_context,
)
from tests.methods.whole_runs import learnt, model_of, same


def copied(server) -> dict[str, torch.Tensor]:
    """Its network as it is now."""
    return {name: value.clone() for name, value in server.network.state().items()}


# What is sent ---------------------------------------------------------------------------------------------------------


def sent_bytes(d: int, c: int, heads: int, rank: int, means: bool = True) -> tuple[int, int]:
    """Up and down, of a client that has the old parts: four factors, prototypes; means, flags, samples; controls."""
    part = 4 * (4 * rank * d + c * d)
    return part + (4 * c * d + c if means else 0) + 8, part + 8 + 8 + 4 * heads


def test_the_papers_sizes():
    """A task of 10 classes at d = 768: 111 KB up, 80 KB down."""
    up, down = sent_bytes(768, 10, 1, 4)
    assert (up - 18, down - 20) == (4 * 27_648, 4 * 19_968)
    assert (round(up / 1e3), round(down / 1e3)) == (111, 80)


@pytest.mark.parametrize("means", [True, False])
def test_bytes_are_those_of_the_formulas(means):
    federation = learnt(pilora(reweighting="distances" if means else "none"), context(), pictures())
    had: set[tuple[int, int]] = set()
    for row in federation.state.ledger.uploads:
        if not row.up_bytes:
            continue
        up, down = sent_bytes(D, CLASSES[row.task], row.task + 1, R, means)
        missed = [task for task in range(row.task) if (row.client, task) not in had]
        had |= {(row.client, task) for task in range(row.task)}
        once = sum(4 * (4 * R * D + CLASSES[task] * D) for task in missed)
        assert (row.up_bytes, row.down_bytes) == (up, down + once)
    # The third client joins in the second task, and is sent the first one's parts then.
    assert (2, 0) in had


def test_nothing_of_the_network_itself_travels_and_old_parts_stay():
    tasks, states = pictures(), []
    server = learn_images(pilora(), context(), tasks, after=lambda _, s: states.append(copied(s)))
    first = {name: value for name, value in states[0].items() if "_0" in name or name.startswith("heads.0")}
    assert len(first) == 5
    for later in states[1:]:
        assert all(torch.equal(later[name], value) for name, value in first.items())
    fresh = pilora().build_network(context())
    moved = [
        name for name, value in fresh.state_dict().items() if not torch.equal(server.network.state_dict()[name], value)
    ]
    assert moved == []
    [layer] = low_rank_layers(server.network.body).values()
    assert all(bool(factor.any()) for factor in layer.B.values())


def test_a_new_task_starts_from_the_network_as_it_was():
    """B = 0: with the first head alone, the features are the frozen ViT's."""
    method, images = pilora(), torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    network = method.build_network(context())
    method.grow(network, [2, 2], 5)
    plain = context().network.build()
    torch.testing.assert_close(network.eval().body(images), plain.eval()(images), atol=1e-6, rtol=1e-5)


def test_the_broadcast_carries_each_half_the_same_initial_values():
    """Both halves draw A and the prototypes; the first broadcast holds what a client draws itself."""
    method, tasks = pilora(), pictures()
    server, client = method.server(context()), method.client(context())
    task = images_stream(tasks)[0]
    server.start_task(task)
    client.prepare(server.heads)
    assert same(server.network.state(), client.network.state())


def test_an_upload_that_contradicts_itself_is_refused():
    method, tasks = pilora(), pictures()
    server, client = method.server(context()), method.client(context())
    task = images_stream(tasks)[0]
    server.start_task(task)
    upload = turn(client, image_shard(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    expected = server.schema(task, upload.stage)
    assert validate_upload(Arrival(0, upload), expected, Chain([]), server).keys() == upload.keys()
    flags = {told: torch.tensor(told, dtype=torch.uint8) for told in [(1, 1, 0), (1, 2, 0)]}
    wrong = {
        "class_means has 1 columns of no sample that are not zero": {PRESENT: flags[1, 1, 0], MEANS: torch.ones(D, 3)},
        "present holds 2": {PRESENT: flags[1, 2, 0]},
        "class_means is not finite": {MEANS: torch.full((D, 3), torch.nan)},
    }
    for told, fields in wrong.items():
        with pytest.raises(UserError, match=told):
            validate_upload(Arrival(0, upload.with_tensors({**upload, **fields})), expected, Chain([]), server)


# Predictions ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_names_the_class_of_the_nearest_prototype_and_so_does_the_saved_model():
    tasks = pictures()
    server = learn_images(pilora(rounds=3), context(), tasks)
    images = torch.cat([images for clients in tasks for images, _ in clients])
    features, model = server.embed(images), server.model()
    prototypes = torch.cat([head.weight for head in server.network.heads]).detach()
    assert torch.equal(model["W"], prototypes.T)
    distances = (features[:, None] - prototypes).norm(dim=2) / D**0.5
    scores = server.predict(images)
    torch.testing.assert_close(scores, -distances, atol=1e-5, rtol=1e-4)
    assert torch.equal((features @ model["W"] + model["bias"]).argmax(dim=1), scores.argmax(dim=1))


@pytest.mark.slow_cases("published")
@pytest.mark.parametrize("variant", ["working", "published"])
def test_which_updates_a_test_applies(variant):
    """All of them, or the first alone."""
    tasks = pictures()
    server = learn_images(pilora(variant=variant, lr=0.1), context(), tasks)
    images = tasks[2][0][0]
    ours, [layer] = server.embed(images), low_rank_layers(server.network.body).values()
    found = {}
    for name, scales in {"working": {}, "published": {1: 0.0, 2: 0.0}}.items():
        layer.scales = scales
        found[name] = server.trainer.features(server.network, images)
    assert torch.equal(ours, found[variant])
    assert not torch.allclose(found["working"], found["published"], atol=1e-4)


@pytest.mark.slow
def test_the_variant_leaves_training_as_it_is():
    models = [model_of(learnt(pilora(variant=variant), context(), pictures())) for variant in ("working", "published")]
    assert same(*models)


@pytest.mark.slow
def test_it_learns():
    """Three classes of images: from a third to nearly all."""
    tasks = image_tasks(np.random.default_rng(3), [3], [[40, 40]])
    federation = learnt(pilora(rounds=5, epochs=5, batch_size=16), context(), tasks)
    right = federation.state.answers["correct"][-1][0] / 80
    assert right > 0.8


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_counts_the_means_that_left():
    tasks, present = pictures(), []
    server = learn_images(pilora(), context(), tasks, seen=lambda *seen: present.append(int(seen[2][PRESENT].sum())))
    classes = sum(len(set(labels.tolist())) for clients in tasks for _, labels in clients)
    assert server.report()[MEANS] == sum(present) == 2 * classes
    assert learn_images(pilora(reweighting="none"), context(), tasks).report()[MEANS] == 0


def test_classes_that_come_back_train_their_old_prototypes_and_no_others():
    tasks = pictures()
    images, labels = tasks[1][0]
    tasks[1][0] = (images, torch.where(labels == 3, 1, labels))  # class 1 of the first task
    states = []
    server = learn_images(pilora(), context(), tasks, after=lambda _, s: states.append(copied(s)))
    before, after = (state["heads.0.weight"] for state in states[:2])
    moved = [row for row in range(3) if not torch.equal(before[row], after[row])]
    assert moved == [1]
    assert server.predict(images).shape[1] == 7


@pytest.mark.slow
def test_seeds_differ_and_repeat():
    runs = [model_of(learnt(pilora(), context(seed=seed), pictures())) for seed in (0, 0, 1)]
    assert same(runs[0], runs[1])
    assert not any(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"rank": 0}, "method.rank"),
        ({"temperature": 0}, "method.temperature"),
        ({"pull": -1}, "method.pull"),
        ({"reweighting": "samples"}, "method.reweighting"),
        ({"layers": [9]}, "method.layers"),
        ({"layers": []}, "method.layers"),
        ({"targets": ["w"]}, "method.targets"),
        ({"targets": []}, "method.targets"),
        ({"trains": "features"}, "method.trains"),
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs, told):
    with pytest.raises(UserError, match=told.replace(".", r"\.")):
        typed_instance(PILoRA, knobs, "method").check(context(), CLASSES)


def test_a_network_that_is_no_transformer_is_refused():
    with pytest.raises(UserError, match="method=pilora works inside a vision transformer"):
        pilora().check(tiny_context(), CLASSES)
