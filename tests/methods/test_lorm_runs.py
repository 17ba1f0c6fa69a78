"""LoRM: bytes, limits, and whole runs."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.engine.codec import decoded
from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.lorm import LoRM
from fcl_bench.methods.transformers.low_rank import low_rank_layers
from fcl_bench.protocol.context import WIRE_DTYPES, Context, WireFormat
from fcl_bench.training.knobs import Training
from fcl_bench.typed import typed_instance
from tests.methods.harness import on_wire
from tests.methods.lorm_harness import HIDDEN, QKV, RANK, D, lorm, rounds_of, setting
from tests.methods.training_harness import ImageTasks, images_stream, learn_images, tiny_context
from tests.methods.whole_runs import learnt, same

# Bytes ----------------------------------------------------------------------------------------------------------------


def vit_b16(alpha: float) -> tuple[LoRM, dict[str, int]]:
    """The method inside a ViT-B/16, without its weights, and how many numbers each Gram matrix has."""
    method = LoRM(alpha=alpha)
    build = partial(VisionTransformer, num_classes=0)
    start = Trainable("vit_b16", build, 768, 224, (0.5,) * 3, (0.5,) * 3, (), {})
    context = dataclasses.replace(tiny_context(), network=start, inputs=768)
    with torch.device("meta"):
        network = method.build_network(context)
    shapes = method.gram_shapes(network).items()
    return method, {name: int(np.prod(shape)) for name, shape in shapes if name.startswith("gram.body.")}


@pytest.mark.parametrize(("alpha", "numbers"), [(0.0, 64_512), (0.3, 134_479_872), (1.0, 134_479_872)])
def test_the_gram_matrices_of_a_vit_b16_as_published(alpha, numbers):
    """qkv, proj and fc1 with 768 inputs, fc2 with 3,072, in 12 blocks."""
    _, sizes = vit_b16(alpha)
    assert len(sizes) == 48
    assert sum(sizes.values()) == numbers
    assert numbers == 12 * (3 * 768 + 3072 if alpha == 0 else 3 * 768**2 + 3072**2)


@pytest.mark.slow_cases("0.5-float64-packed")
@pytest.mark.parametrize(("alpha", "wire", "gram"), [(0.0, "float32", "full"), (0.5, "float64", "packed")])
def test_bytes_by_formula(alpha, wire, gram):
    """Up: the factor that trained, the head, and Grams; down: both factors and the head, and what is old once."""
    context, tasks = setting([[9, 6], [7, 8], [4, 4]], wire=wire)
    context = dataclasses.replace(context, wire=dataclasses.replace(context.wire, gram=gram))
    rows = learnt(lorm(alpha=alpha), context, tasks).state.ledger.uploads
    each = {"float32": 4, "float64": 8}[wire]

    def matrix(side: int) -> int:
        return side * (side + 1) // 2 if gram == "packed" else side * side

    head, control = 2 * (D + 1), 8 + 8
    A, B = RANK * (D + HIDDEN), (3 * D + D) * RANK
    layers = matrix(D) + matrix(HIDDEN) if alpha else D + HIDDEN
    up = {
        0: each * (B + head + 2 * matrix(RANK) + matrix(D)) + 8,
        1: each * (A + head + layers + matrix(D)) + 8,
        2: each * layers,
    }
    for row in rows:
        assert row.up_bytes == up[row.round], row
        sizes = 4 * (row.task + 1)
        new = 4 * (A + B + head)
        if row.round == 2:
            # The last model of this task; of those before, everything is there.
            assert row.down_bytes == new + sizes, row
        else:
            # Old heads go down under their own names when they no longer train; old factors have been sent.
            old = 4 * head if row.task and row.round == 0 else 0
            assert row.down_bytes == new + old + sizes + control, row


def test_a_client_that_comes_late_gets_the_earlier_updates_once():
    context, tasks = setting([[9, 0], [7, 8]])
    rows = learnt(lorm(), context, tasks).state.ledger.uploads
    down = {(row.task, row.round, row.client): row.down_bytes for row in rows if row.down_bytes}
    assert not any(task == 0 and client == 1 for task, _, client in down)
    assert down[1, 0, 1] - down[1, 0, 0] == 4 * RANK * (D + HIDDEN + 4 * D)
    assert down[1, 1, 1] == down[1, 1, 0]


# Limits and whole runs ------------------------------------------------------------------------------------------------


def test_average_is_the_mean_of_both_factors_and_sends_no_gram():
    context, [clients] = setting([[12, 4]])
    method = lorm(merge="average")
    assert method.stages(images_stream([clients])[0]) == ["model"] * 2
    for before, uploads, _, after in rounds_of(method, context, clients, 2):
        assert uploads[0].keys() == {
            name for name in before if name.startswith("heads") or ".A." in name or ".B." in name
        }
        for name in uploads[0]:
            mean = 0.75 * uploads[0][name].double() + 0.25 * uploads[1][name].double()
            torch.testing.assert_close(after[name].double(), mean, atol=1e-6, rtol=1e-6)


def recurring() -> tuple[Context, ImageTasks]:
    """Class 0 comes back in the second task; a client is late, another has no sample of the last task."""
    context, tasks = setting([[9, 6, 0], [7, 6, 5], [8, 0, 6]])
    images, labels = tasks[1][0]
    tasks[1][0] = images, torch.where(labels == labels[0], 0, labels)
    return context, tasks


@pytest.mark.slow_cases("grams")
@pytest.mark.parametrize("merge", ["grams", "average"])
def test_a_server_that_loads_the_model_on_file_predicts_as_the_one_that_saved_it(merge):
    context, tasks = recurring()
    method = lorm(merge=merge)
    server, loaded = learn_images(method, context, tasks), method.server(context)
    loaded.load_model({name: value.clone() for name, value in server.model().items()}, images_stream(tasks))
    images = torch.cat([images for clients in tasks for images, _ in clients])
    torch.testing.assert_close(loaded.predict(images), server.predict(images))


def test_rows_of_a_class_that_is_not_there_stay_in_a_head_that_comes_back():
    context, tasks = recurring()
    heads = []
    learn_images(
        lorm(), context, tasks[:2], after=lambda _, server: heads.append(server.network.heads[0].weight.clone())
    )
    assert torch.equal(heads[0][1], heads[1][1])
    assert not torch.equal(heads[0][0], heads[1][0])


def test_a_task_without_a_label_changes_nothing():
    context, tasks = setting([[9, 6], [7, 8], [4, 4]])
    found = learnt(lorm(), context, tasks, unlabelled=[(0, 0), (0, 1), (2, 0), (2, 1)])
    for layer in low_rank_layers(found.server.network.body).values():
        [part] = layer.parts
        assert (layer.delta(part, 0) == 0).all()
        assert (layer.delta(part, 2) == 0).all()
        # The second task alone has inputs, and its update is the whole one: there are more rows than inputs.
        torch.testing.assert_close(layer.merged[part], layer.delta(part, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("wire", "gram", "close"), [("float32", "packed", 1e-3), ("bfloat16", "full", 0.5)])
def test_rounded_grams_merge_nearly_as_exact_ones(wire, gram, close):
    """The outputs of the merged class weights, relative to how far the clients' own are from their mean."""
    context, [clients] = setting([[12, 7, 9]])
    method = lorm(rounds=1, alpha=1.0, alpha_head=1.0)
    sent = WireFormat(WIRE_DTYPES[wire], gram=gram)
    rounded = method.server(dataclasses.replace(context, wire=sent))
    [task] = images_stream([clients])
    rounded.start_task(task)
    rounded.broadcast(task, 0)
    [(_, uploads, inputs, after)] = rounds_of(method, context, clients, 1)
    for k, upload in enumerate(uploads):
        rounded.absorb(k, decoded(on_wire(upload, method, rounded.context), torch.float64))
    rounded.finish_round()
    X = np.concatenate([own["heads"] for own in inputs])
    W = [upload["heads.0.weight"].double().numpy() for upload in uploads]
    spread = np.linalg.norm(X @ (W[0] - np.mean(W, axis=0)).T)
    off = rounded.network.heads[0].weight.double().detach().numpy() - after["heads.0.weight"].double().numpy()
    assert 0 < np.linalg.norm(X @ off.T) < close * spread


@pytest.mark.slow
def test_seeds_draw_other_updates_and_both_halves_the_same():
    context, tasks = setting([[9], [9]])
    server, again = (learn_images(lorm(), context, tasks) for _ in range(2))
    assert same(server.network.state(), again.network.state())
    other = learn_images(lorm(), dataclasses.replace(context, seed=1), tasks)
    name = f"{QKV}.A.qkv_1"
    assert not torch.equal(server.network.state()[name], other.network.state()[name])
    assert not torch.equal(server.network.state()[name], server.network.state()[f"{QKV}.A.qkv_0"])


def test_the_frozen_network_stays_and_never_travels():
    context, tasks = setting([[9], [9]])
    names = []
    server = learn_images(lorm(), context, tasks, seen=lambda _, down, up: names.extend([*down, *up]))
    assert not any(".linear." in name or "cls_token" in name for name in names)
    plain = context.network.build().state_dict()
    for name, value in server.network.body.state_dict().items():
        if ".A." not in name and ".B." not in name:
            assert torch.equal(value, plain[name.replace(".linear.", ".")])


def test_what_cannot_be_is_refused_in_a_line():
    context, _ = setting([[2]])
    for message, knobs in {
        "method.layers=.5. for a network of 4 blocks": {"layers": [5]},
        "w is no linear layer of a block": {"targets": ["w"]},
        "method.rank=17 for body.blocks.1.attn.qkv": {"rank": 17},
        "method.ccvr=gaussian: clients do not have the model": {"ccvr": "gaussian"},
        "method.trains=features: method=lorm trains a part of its own inside the network": {"trains": "features"},
    }.items():
        with pytest.raises(UserError, match=message):
            lorm(**knobs).check(context, [2])
    with pytest.raises(UserError, match="server_optimizer=adam: method.merge=grams makes the new model itself"):
        dataclasses.replace(lorm(), training=Training(server_optimizer="adam")).check(context, [2])
    convolutions = tiny_context()
    with pytest.raises(UserError, match="works inside a vision transformer"):
        lorm().check(convolutions, [2])
    for name, value in (("alpha", 1.5), ("alpha_head", -1), ("rank", 0), ("merge", "fisher")):
        with pytest.raises(UserError, match=rf"^method\.{name}="):
            typed_instance(LoRM, {name: value}, "method")
