"""RegMean inside whole networks: Gram matrices against plain hooks, what is merged and what not, and bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.transformers.regmean import RegMean
from fcl_bench.protocol.message import Message
from tests.methods.classical_harness import INPUTS, exchanged, feature_tasks, pictures, training
from tests.methods.harness import relative_error, turn
from tests.methods.regmean_harness import EXACT, joint, model_of_server, regmean
from tests.methods.training_harness import image_shard, images_stream, learn_images, tiny_context
from tests.methods.whole_runs import feature_context, learnt

VIT_LAYERS = {
    f"body.blocks.{block}.{name}" for block in range(4) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
}


def hooked(network: torch.nn.Module, images: torch.Tensor) -> dict[str, np.ndarray]:
    """X'X of every linear layer's inputs and a constant, of all images in one batch."""
    found: dict[str, np.ndarray] = {}

    def take(name):
        def hook(_, given):
            X = given[0].detach().reshape(-1, given[0].shape[-1]).double().numpy()
            X = np.c_[X, np.ones(len(X))]
            found[name] = found.get(name, 0) + X.T @ X

        return hook

    hooks = [
        module.register_forward_pre_hook(take("heads" if name.startswith("heads") else name))
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "heads.1"
    ]
    network.eval()
    with torch.no_grad():
        network(images)
    for hook in hooks:
        hook.remove()
    return found


def test_grams_are_those_of_every_linear_layers_inputs_under_the_trained_model():
    """Of a vision transformer, tokens are rows; in the second task, with two heads."""
    method, context, tasks = regmean(), tiny_context(architecture="vit", **EXACT), pictures()
    server, client = learn_images(method, context, tasks[:1]), method.client(context)
    task = images_stream(tasks)[1]
    server.start_task(task)
    broadcast, client_data = server.broadcast(task, 0), image_shard(0, 1, *tasks[1][0])
    upload = turn(client, client_data, broadcast)
    assert {name for name in upload if name.startswith("gram.")} == {f"gram.{name}" for name in VIT_LAYERS | {"heads"}}
    assert all(torch.equal(upload[name], value) for name, value in client.network.changing().items())
    expected = hooked(client.network, client.trainer.standardise(client_data.inputs))
    for name, G in expected.items():
        np.testing.assert_allclose(upload[f"gram.{name}"].numpy(), G, rtol=1e-5, atol=1e-4)
    assert expected["body.blocks.0.attn.qkv"][-1, -1] > len(client_data.labels) == expected["heads"][-1, -1]
    broadcast_model = hooked_before(server, client.trainer.standardise(client_data.inputs))
    assert relative_error(upload["gram.heads"], broadcast_model["heads"]) > 1e-4


def hooked_before(server, images) -> dict[str, np.ndarray]:
    return hooked(server.network, images)


def test_linear_layers_of_the_body_are_merged_and_all_else_is_averaged():
    """After one round from the same start; of the network that fedavg averages, nothing but linear layers differs."""
    method, context, tasks = regmean(rounds=1), tiny_context(architecture="vit", **EXACT), pictures()[:1]
    uploads: dict[int, Message] = {}
    start: dict[str, torch.Tensor] = {}

    def seen(client, broadcast, upload):
        uploads[client] = upload
        start.update(broadcast)

    ours = learn_images(method, context, tasks, seen=seen).network.state()
    theirs = learn_images(FedAvg(method.training), context, tasks).network.state()
    linear = {*VIT_LAYERS, "heads.0"}
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]) == (name.rpartition(".")[0] not in linear), name
    for layer in linear:
        gram = "gram.heads" if layer == "heads.0" else f"gram.{layer}"
        W = joint(start, f"{layer}.weight")
        G = {k: upload[gram].double().numpy() for k, upload in uploads.items()}
        change = sum((joint(upload, f"{layer}.weight") - W) @ G[k] for k, upload in uploads.items())
        # An eigenvalue of rounding's size may be on either side of the cut: the outputs are what is certain.
        off = (joint(ours, f"{layer}.weight") - W) @ sum(G.values()) - change
        assert np.abs(off).max() < 1e-5 * max(1.0, np.abs(sum(G.values())).max())


def test_a_convolutional_body_is_fedavgs_average():
    """No linear layer in it: after a round the heads alone differ."""
    method, context, tasks = regmean(rounds=1), tiny_context(**EXACT), pictures()[:1]
    ours, theirs = (learn_images(m, context, tasks).network.state() for m in (method, FedAvg(method.training)))
    assert {name for name in theirs if not torch.equal(ours[name], theirs[name])} == {"heads.0.weight", "heads.0.bias"}


class HalfFrozen(RegMean):
    """Its first two blocks stay as the first task leaves them."""

    def frozen(self, network, task, reused=frozenset()):
        blocks = [name for name, _ in network.named_parameters() if name.startswith(("body.blocks.0", "body.blocks.1"))]
        return super().frozen(network, task, reused) | (set(blocks) if task else set())


@pytest.mark.slow
def test_what_is_frozen_has_no_gram_and_stays_to_the_bit():
    """Layers of the body, old heads, and rows of classes that are not in the task in an old head that trains."""
    method = HalfFrozen(training(), frozen_heads=True)
    context, states, fields = tiny_context(architecture="vit"), [], []
    learn_images(
        method,
        context,
        pictures(),
        seen=lambda _, __, upload: fields.append({name for name in upload if name.startswith("gram.")}),
        after=lambda _, server: states.append(model_of_server(server)),
    )
    assert len(fields[0]) == 17
    assert fields[-1] == {f"gram.{name}" for name in VIT_LAYERS if int(name.split(".")[2]) >= 2} | {"gram.heads"}
    kept = [name for name in states[0] if name.startswith(("heads.0", "body.blocks.1.attn.qkv"))]
    assert len(kept) == 4
    for name in kept:
        assert torch.equal(states[0][name], states[2][name])
    features, ends = regmean(trains="features", frozen_heads=True), []
    learn_images(
        features, feature_context(INPUTS), feature_tasks(True), after=lambda _, s: ends.append(model_of_server(s))
    )
    for kind in ("weight", "bias"):
        before, after = (end[f"heads.0.{kind}"] for end in ends[:2])
        assert torch.equal(before[:2], after[:2])
        assert not torch.equal(before[2], after[2]), "the class that the second task has again"


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("0.0-False", "1.0-False", "1.0-True")
@pytest.mark.parametrize(("damping", "packed"), [(1.0, False), (1.0, True), (0.0, False)])
def test_bytes_are_fedavgs_and_a_gram_matrix_for_each_layer(damping, packed):
    """(i + 1)^2 numbers, packed (i + 1)(i + 2)/2, of diagonals i + 1."""

    def run(method):
        context = tiny_context(architecture="vit")
        wire = dataclasses.replace(context.wire, gram="packed" if packed else "full")
        return exchanged(learnt(method, dataclasses.replace(context, wire=wire), pictures()))

    method = regmean(damping=damping)
    width = tiny_context(architecture="vit").network.dimension
    sides = [1 + side for side in 4 * [width, width, width, 4 * width] + [width]]
    numbers = sides if damping == 0 else [i * (i + 1) // 2 if packed else i**2 for i in sides]
    for ours, theirs in zip(run(method), run(FedAvg(method.training)), strict=True):
        assert ours.down_bytes == theirs.down_bytes
        assert ours.up_bytes - theirs.up_bytes == (4 * sum(numbers) if theirs.up_bytes else 0)
