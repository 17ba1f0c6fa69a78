"""LoRM: the merge of a round and of the tasks against least squares on the clients' true inputs, bytes, and limits."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from fcl_bench.backbones.trainable import Trainable
from fcl_bench.config import typed_instance
from fcl_bench.engine.codec import decoded, encoded
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.lorm import LoRM
from fcl_bench.protocol.problem import Problem, TestBatch
from fcl_bench.protocol.wire import WIRE_DTYPES, WireFormat
from fcl_bench.training.knobs import Training
from fcl_bench.training.vit.low_rank import LowRank, low_rank_layers
from tests.methods.harness import turn
from tests.methods.training_harness import (
    ImageTasks,
    federation_of,
    image_shard,
    image_tasks,
    images_stream,
    learn_image_task,
    learn_images,
    tiny_problem,
)
from tests.methods.whole_runs import assert_resumes, learnt, same

QKV, FC2 = "body.blocks.1.attn.qkv", "body.blocks.1.mlp.fc2"
#: d = 16 features and inputs of qkv, 64 of fc2.
D, HIDDEN, RANK = 16, 64, 2


def lorm(rounds: int = 2, **knobs) -> LoRM:
    own = {name: knobs.pop(name) for name in ("epochs", "lr", "fraction", "augment") if name in knobs}
    training = {"epochs": 1, "lr": 0.02, "augment": "none", **own}
    made = Training(rounds=rounds, batch_size=16, optimizer="adamw", weight_decay=0.0, **training)
    return LoRM(made, **{"rank": RANK, "targets": ["qkv", "fc2"], "layers": [1], **knobs})


def setting(per_client: list[list[int]], classes: int = 2, **options) -> tuple[Problem, ImageTasks]:
    """`options` are those of `tiny_problem`."""
    tasks = image_tasks(np.random.default_rng(0), [classes] * len(per_client), per_client)
    return tiny_problem(**{"width": 2, "architecture": "vit", "wire": "float64", **options}), tasks


class Watched:
    """A client half whose true inputs of each adapted layer, and features, are known after every turn."""

    def __init__(self, method: LoRM, problem: Problem) -> None:
        self.client = method.client(problem)
        self.problem = problem

    def inputs(self, images: torch.Tensor) -> dict[str, np.ndarray]:
        """X (rows, i) under the network as it is."""
        seen: dict[str, torch.Tensor] = {}
        network = self.client.network.eval()
        hooks = [
            layer.register_forward_hook(lambda _, given, __, path=path: seen.update({path: given[0]}))
            for path, layer in low_rank_layers(network.body).items()
        ]
        with torch.no_grad():
            seen["heads"] = network.body(self.client.trainer.standardise(images))
        for hook in hooks:
            hook.remove()
        return {name: X.flatten(0, -2).double().numpy() for name, X in seen.items()}


def rounds_of(method: LoRM, problem: Problem, clients, rounds: int):
    """The first task by hand. Per round: the server before, each client's upload and true inputs, the server after."""
    server, watched = method.server(problem), Watched(method, problem)
    [task] = images_stream([clients])
    server.start_task(task)
    for round_ in range(rounds):
        before = {name: value.clone() for name, value in server.network.state().items()}
        broadcast = server.broadcast(task, round_)
        expected, uploads, inputs = server.expects(task, round_), [], []
        for k, (images, labels) in enumerate(clients):
            upload = turn(watched.client, image_shard(k, 0, images, labels), broadcast, {}, round_)
            assert upload.keys() == expected.keys()
            assert all(tuple(upload[name].shape) == expected[name].shape for name in upload)
            inputs.append(watched.inputs(images))
            server.absorb(k, upload)
            uploads.append(upload)
        server.finish_round()
        after = {name: value.clone() for name, value in server.network.state().items()}
        yield before, uploads, inputs, after


def stacked(X: list[np.ndarray], W: list[np.ndarray], alpha: float, A: np.ndarray | None = None) -> np.ndarray:
    """The W (o, i) nearest to all W_k on the inputs X_k A', by least squares; damping as further rows of inputs.

    alpha G + (1 - alpha) diag(G) is the Gram matrix of sqrt(alpha) X and sqrt(1 - alpha) diag(G)^(1/2) together.
    Inputs after a layer norm add up to 0, but for float32: what is that small is left out.
    """
    rows, targets = [], []
    for x, w in zip(X, W, strict=True):
        both = np.concatenate([alpha**0.5 * x, (1 - alpha) ** 0.5 * np.diag(np.sqrt(np.square(x).sum(axis=0)))])
        both = both if A is None else both @ A.T
        rows.append(both)
        targets.append(both @ w.T)
    return np.linalg.lstsq(np.concatenate(rows), np.concatenate(targets), rcond=1e-6)[0].T


def assert_same_outputs(found: torch.Tensor, expected: np.ndarray, X: list[np.ndarray], alpha: float) -> None:
    """The same weights; or, where undamped inputs may be few and rounded to float32, the same outputs on these."""
    W = found.double().numpy()
    if alpha < 1:
        np.testing.assert_allclose(W, expected, atol=1e-4)
    rows = np.concatenate(X)
    np.testing.assert_allclose(rows @ W.T, rows @ expected.T, atol=2e-4 * np.abs(rows).max())


@pytest.mark.parametrize(("alpha", "alpha_head"), [(0.0, 0.5), (1.0, 1.0), (0.4, 0.0)])
def test_a_round_is_least_squares_on_the_clients_true_inputs(alpha, alpha_head):
    problem, [clients] = setting([[12, 7, 9]])
    method = lorm(alpha=alpha, alpha_head=alpha_head)
    sizes = [len(labels) for _, labels in clients]
    for round_, (before, uploads, inputs, after) in enumerate(rounds_of(method, problem, clients, 2)):
        trained, resting = "BA"[round_], "AB"[round_]
        for path in (QKV, FC2):
            part = path.rpartition(".")[2]
            name = f"{path}.{trained}.{part}_0"
            X, W = [own[path] for own in inputs], [upload[name].double().numpy() for upload in uploads]
            A = before[f"{path}.A.{part}_0"].double().numpy() if trained == "B" else None
            expected = stacked(X, W, alpha, A)
            assert_same_outputs(after[name], expected, X if A is None else [x @ A.T for x in X], alpha)
            assert torch.equal(after[f"{path}.{resting}.{part}_0"], before[f"{path}.{resting}.{part}_0"])
            assert not any(f".{resting}." in own for own in uploads[0])
        W = [upload["heads.0.weight"].double().numpy() for upload in uploads]
        features = [own["heads"] for own in inputs]
        assert_same_outputs(after["heads.0.weight"], stacked(features, W, alpha_head), features, alpha_head)
        assert not torch.allclose(after["heads.0.weight"], before["heads.0.weight"], atol=1e-3)
        biases = [upload["heads.0.bias"].double().numpy() for upload in uploads]
        np.testing.assert_allclose(after["heads.0.bias"].numpy(), np.average(biases, axis=0, weights=sizes), atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_one_client_gets_its_own_model_back(alpha):
    """Bit for bit, whatever its inputs are."""
    problem, [clients] = setting([[3]])
    for _, [upload], _, after in rounds_of(lorm(alpha=alpha, alpha_head=alpha), problem, clients, 2):
        for name, value in upload.items():
            if not name.startswith("gram."):
                assert torch.equal(after[name], value)


def test_grams_are_taken_under_the_mean_and_training_runs_on_the_tasks_own_update():
    problem, tasks = setting([[9], [9]])
    method, seen = lorm(), []
    server, watched = method.server(problem), Watched(method, problem)
    acting = []
    forward = LowRank.forward

    def looked(layer, x):
        acting.append((torch.is_grad_enabled(), dict(layer.scales), bool(layer.merged)))
        return forward(layer, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRank, "forward", looked)
        for task, clients in zip(images_stream(tasks), tasks, strict=True):
            acting.clear()
            learn_image_task(method, problem, server, task, clients)
            seen.append({(trains, tuple(scales.values()), merged) for trains, scales, merged in acting})
            acting.clear()
            server.classify(TestBatch.of(clients[0][0]))
            assert {merged for _, _, merged in acting} == {True}
    del watched
    assert seen[1] == {(True, (0.0, 1.0), False), (False, (0.5, 0.5), False)}
    assert seen[0] == {(True, (1.0,), False), (False, (1.0,), False)}


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_tasks_are_merged_by_least_squares_on_their_inputs(alpha):
    problem, tasks = setting([[9, 6], [5, 8]])
    method, inputs, server, deltas = lorm(alpha=alpha, epochs=2), [], None, []
    server, watched = method.server(problem), Watched(method, problem)
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        learn_image_task(method, problem, server, task, clients)
        # The clients' network under the task's last model, with the mean of the updates.
        own = watched.client
        own.prepare(server.heads)
        own.network.load(server.network.state())
        inputs.append([watched.inputs(images) for images, _ in clients])
        merged = {path: layer.merged for path, layer in low_rank_layers(server.network.body).items()}
        for path in (QKV, FC2):
            part = path.rpartition(".")[2]
            layer = low_rank_layers(server.network.body)[path]
            deltas = [layer.delta(part, done).detach().double().numpy() for done in range(task.index + 1)]
            X = [np.concatenate([client[path] for client in of]) for of in inputs]
            assert_same_outputs(merged[path][part], stacked(X, deltas, alpha), X, alpha)
    assert np.abs(deltas[0] - deltas[1]).max() > 1e-3


def test_a_task_that_is_going_on_is_predicted_by_the_mean_of_the_updates():
    problem, tasks = setting([[9], [9]])
    method = lorm()
    server = learn_images(method, problem, tasks[:1])
    assert all(layer.merged for layer in low_rank_layers(server.network.body).values())
    server.start_task(images_stream(tasks)[1])
    for layer in low_rank_layers(server.network.body).values():
        assert not layer.merged
        assert layer.scales == {0: 0.5, 1: 0.5}


# Bytes ----------------------------------------------------------------------------------------------------------------


def vit_b16(alpha: float) -> tuple[LoRM, dict[str, int]]:
    """The method inside a ViT-B/16, without its weights, and how many numbers each Gram matrix has."""
    method = LoRM(alpha=alpha)
    build = partial(VisionTransformer, num_classes=0)
    start = Trainable("vit_b16", build, 768, 224, (0.5,) * 3, (0.5,) * 3, (), {})
    problem = dataclasses.replace(tiny_problem(), network=start, inputs=768)
    with torch.device("meta"):
        network = method.build_network(problem)
    sizes = {name: int(np.prod(shape)) for name, shape in method.gram_sizes(network).items()}
    return method, {name: sizes[name] for name in [*method.layer_fields(network), "gram.heads"]}


@pytest.mark.parametrize(("alpha", "numbers"), [(0.0, 64_512), (0.3, 134_479_872), (1.0, 134_479_872)])
def test_the_gram_matrices_of_a_vit_b16_as_published(alpha, numbers):
    """qkv, proj and fc1 with 768 inputs, fc2 with 3,072, in 12 blocks."""
    _, sizes = vit_b16(alpha)
    assert sizes.pop("gram.heads") == 768**2
    assert len(sizes) == 48
    assert sum(sizes.values()) == numbers
    assert numbers == 12 * (3 * 768 + 3072 if alpha == 0 else 3 * 768**2 + 3072**2)


@pytest.mark.parametrize(("alpha", "wire", "gram"), [(0.0, "float32", "full"), (0.5, "float64", "packed")])
def test_bytes_by_formula(alpha, wire, gram):
    """Up: the factor that trained, the head, and Grams; down: both factors and the head, and what is old once."""
    problem, tasks = setting([[9, 6], [7, 8], [4, 4]], wire=wire)
    problem = dataclasses.replace(problem, wire=dataclasses.replace(problem.wire, gram=gram))
    rows = learnt(lorm(alpha=alpha), problem, tasks).state.ledger.uploads
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
    problem, tasks = setting([[9, 0], [7, 8]])
    rows = learnt(lorm(), problem, tasks).state.ledger.uploads
    down = {(row.task, row.round, row.client): row.down_bytes for row in rows if row.down_bytes}
    assert not any(task == 0 and client == 1 for task, _, client in down)
    assert down[1, 0, 1] - down[1, 0, 0] == 4 * RANK * (D + HIDDEN + 4 * D)
    assert down[1, 1, 1] == down[1, 1, 0]


# Limits and whole runs ------------------------------------------------------------------------------------------------


def test_average_is_the_mean_of_both_factors_and_sends_no_gram():
    problem, [clients] = setting([[12, 4]])
    method = lorm(merge="average")
    assert method.stages(images_stream([clients])[0]) == ["model"] * 2
    for before, uploads, _, after in rounds_of(method, problem, clients, 2):
        assert uploads[0].keys() == {
            name for name in before if name.startswith("heads") or ".A." in name or ".B." in name
        }
        for name in uploads[0]:
            mean = 0.75 * uploads[0][name].double() + 0.25 * uploads[1][name].double()
            torch.testing.assert_close(after[name].double(), mean, atol=1e-6, rtol=1e-6)


def recurring() -> tuple[Problem, ImageTasks]:
    """Class 0 comes back in the second task; a client is late, another has no sample of the last task."""
    problem, tasks = setting([[9, 6, 0], [7, 6, 5], [8, 0, 6]])
    images, labels = tasks[1][0]
    tasks[1][0] = images, torch.where(labels == labels[0], 0, labels)
    return problem, tasks


@pytest.mark.parametrize("knobs", [{}, {"alpha": 0.5, "fraction": 0.6}, {"merge": "average"}], ids=str)
def test_a_run_goes_on_inside_a_task(knobs):
    problem, tasks = recurring()
    whole, _ = assert_resumes(partial(federation_of, lorm(**knobs), problem, tasks), step=2)
    merged = {name: value for name, value in whole.server.model().items() if name.startswith("delta.")}
    assert len(merged) == (0 if "merge" in knobs else 2)


def test_rows_of_a_class_that_is_not_there_stay_in_a_head_that_comes_back():
    problem, tasks = recurring()
    heads = []
    learn_images(
        lorm(), problem, tasks[:2], after=lambda _, server: heads.append(server.network.heads[0].weight.clone())
    )
    assert torch.equal(heads[0][1], heads[1][1])
    assert not torch.equal(heads[0][0], heads[1][0])


def test_a_task_without_a_label_changes_nothing():
    problem, tasks = setting([[9, 6], [7, 8], [4, 4]])
    found = learnt(lorm(), problem, tasks, unlabelled=[(0, 0), (0, 1), (2, 0), (2, 1)])
    for layer in low_rank_layers(found.server.network.body).values():
        [part] = layer.parts
        assert (layer.delta(part, 0) == 0).all()
        assert (layer.delta(part, 2) == 0).all()
        # The second task alone has inputs, and its update is the whole one: there are more rows than inputs.
        torch.testing.assert_close(layer.merged[part], layer.delta(part, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("wire", "gram", "close"), [("float32", "packed", 1e-3), ("bfloat16", "full", 0.5)])
def test_rounded_grams_merge_nearly_as_exact_ones(wire, gram, close):
    """The outputs of the merged class weights, relative to how far the clients' own are from their mean."""
    problem, [clients] = setting([[12, 7, 9]])
    method = lorm(rounds=1, alpha=1.0, alpha_head=1.0)
    sent = WireFormat(WIRE_DTYPES[wire], gram=gram)
    rounded = method.server(dataclasses.replace(problem, wire=sent))
    [task] = images_stream([clients])
    rounded.start_task(task)
    rounded.broadcast(task, 0)
    [(_, uploads, inputs, after)] = rounds_of(method, problem, clients, 1)
    for k, upload in enumerate(uploads):
        rounded.absorb(k, decoded(encoded(upload, sent), torch.float64))
    rounded.finish_round()
    X = np.concatenate([own["heads"] for own in inputs])
    W = [upload["heads.0.weight"].double().numpy() for upload in uploads]
    spread = np.linalg.norm(X @ (W[0] - np.mean(W, axis=0)).T)
    off = rounded.network.heads[0].weight.double().detach().numpy() - after["heads.0.weight"].double().numpy()
    assert 0 < np.linalg.norm(X @ off.T) < close * spread


def test_passes_multiply_the_grams_and_augmentation_changes_them():
    problem, [clients] = setting([[9]])

    def gram_under(**knobs) -> torch.Tensor:
        *_, (_, [upload], _, _) = rounds_of(lorm(**knobs), problem, clients, 2)
        return upload[f"gram.{QKV}"]

    # The first round's model is the client's own either way, to rounding.
    once, twice = gram_under(), gram_under(passes=2)
    torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-3)


def test_seeds_draw_other_updates_and_both_halves_the_same():
    problem, tasks = setting([[9], [9]])
    server, again = (learn_images(lorm(), problem, tasks) for _ in range(2))
    assert same(server.network.state(), again.network.state())
    other = learn_images(lorm(), dataclasses.replace(problem, seed=1), tasks)
    name = f"{QKV}.A.qkv_1"
    assert not torch.equal(server.network.state()[name], other.network.state()[name])
    assert not torch.equal(server.network.state()[name], server.network.state()[f"{QKV}.A.qkv_0"])


def test_the_frozen_network_stays_and_never_travels():
    problem, tasks = setting([[9], [9]])
    names = []
    server = learn_images(lorm(), problem, tasks, seen=lambda _, down, up: names.extend([*down, *up]))
    assert not any(".linear." in name or "cls_token" in name for name in names)
    plain = problem.network.build().state_dict()
    for name, value in server.network.body.state_dict().items():
        if ".A." not in name and ".B." not in name:
            assert torch.equal(value, plain[name.replace(".linear.", ".")])


def test_what_cannot_be_is_refused_in_a_line():
    problem, _ = setting([[2]])
    for message, knobs in {
        "method.layers=.5. for a network of 4 blocks": {"layers": [5]},
        "w is no linear layer of a block": {"targets": ["w"]},
        "method.rank=17 for body.blocks.1.attn.qkv": {"rank": 17},
        "method.replay_head=gaussian: clients do not have the model": {"replay_head": "gaussian"},
        "method=lorm works inside a vision transformer, and features is none": {"on": "features"},
    }.items():
        with pytest.raises(UserError, match=message):
            lorm(**knobs).check(problem, [2])
    with pytest.raises(UserError, match="server_optimizer=adam: method.merge=grams makes the new model itself"):
        dataclasses.replace(lorm(), training=Training(server_optimizer="adam")).check(problem, [2])
    convolutions = tiny_problem()
    with pytest.raises(UserError, match="works inside a vision transformer"):
        lorm().check(convolutions, [2])
    for name, value in (("alpha", 1.5), ("alpha_head", -1), ("rank", 0), ("passes", 0), ("merge", "fisher")):
        with pytest.raises(UserError, match=rf"^method\.{name}="):
            typed_instance(LoRM, {name: value}, "method")
