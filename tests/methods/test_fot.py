"""FOT: clients train freely, the aggregated update is projected, subspaces come from a sum of random sketches."""

from __future__ import annotations

import logging

import numpy as np
import pandas as pd
import pytest
import torch

from fcl_bench.engine.codec import decoded
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.projection import fot
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.methods.projection.projected import basis_name
from fcl_bench.protocol.context import Context, TestBatch
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from fcl_bench.typed import typed_instance
from tests.methods import fedprotip_oracle as oracle
from tests.methods.fedprotip_harness import (
    HEADS,
    SMALL,
    bases_of,
    copy_of,
    layer_of,
    linear_context,
    phi,
    projector,
    rows,
    stage_of,
    three_tasks,
    training,
)
from tests.methods.harness import on_wire, turn
from tests.methods.training_harness import (
    CPU,
    ImageTasks,
    image_shard,
    image_tasks,
    images_stream,
    learn_image_task,
    learn_images,
    tiny_context,
)
from tests.small_runs import run_in

DIMENSIONS = {"body.stage2.0": 36, "body.stage3.0": 72, "body.stage4.0": 144, HEADS: 32}


def fot_of(knobs: dict | None = None, **own) -> FOT:
    return FOT(
        training=training(**{"epochs": 2, **(knobs or {})}),
        **{"frozen_stages": 1, "threshold": 0.8, "projected_heads": True, **own},
    )


# The aggregated update ------------------------------------------------------------------------------------------------


def leaks(method: FOT, context: Context, tasks: ImageTasks):
    """(task, name) -> how far the clients' and the averaged updates are from orthogonal to what is protected."""
    local: dict[tuple[int, str], list[float]] = {}
    averaged: dict[tuple[int, str], list[float]] = {}
    states: list[dict[str, torch.Tensor]] = []
    server = method.server(context)
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        model: dict[str, tuple[np.ndarray, np.ndarray]] = {}

        def seen(k, broadcast, message, task=task, model=model):
            prefix = "" if "rate" in broadcast else f"final.{task.index}."
            names = [
                name for name in broadcast if name.endswith("weight") and phi(broadcast, layer_of(name)) is not None
            ]
            for name, (old, Phi) in model.items():
                averaged.setdefault((task.index, name), []).append(
                    oracle.leak(rows(broadcast[prefix + name]), old, Phi)
                )
            model.clear()
            for name in names:
                if stage_of(message) == "model" and name in message:
                    old, Phi = rows(broadcast[name]), phi(broadcast, layer_of(name))
                    model[name] = old, Phi
                    local.setdefault((task.index, name), []).append(oracle.leak(rows(message[name]), old, Phi))

        learn_image_task(method, context, server, task, clients, seen=seen)
        states.append(copy_of(server.network.state_dict()))
    return local, averaged, states


@pytest.mark.slow_cases("{'frozen_heads': False}", "{'loss_classes': 'task', 'mass': 'sum', 'threshold': 0.5}", "{}")
@pytest.mark.parametrize(
    "knobs", [{}, {"frozen_heads": False}, {"loss_classes": "task", "mass": "sum", "threshold": 0.5}], ids=str
)
def test_only_the_aggregated_update_is_orthogonal_to_the_protected_inputs(knobs):
    """For every layer, heads included, with momentum and weight decay; the clients' own updates are not."""
    local, averaged, states = leaks(fot_of(**knobs), tiny_context(), three_tasks())
    trained = {f"body.stage{stage}.0.weight" for stage in (2, 3, 4)}
    for task in (1, 2):
        heads = (
            {f"heads.{task}.weight"} if "frozen_heads" not in knobs else {f"heads.{t}.weight" for t in range(task + 1)}
        )
        assert {name for of, name in averaged if of == task} == trained | heads
    assert averaged.keys() == local.keys()
    assert max(max(found) for found in averaged.values()) <= 1e-5
    # A client's update has a good part inside: it was not projected.
    assert min(max(found) for found in local.values()) > 1e-2
    moved = {name for name, value in states[0].items() if not torch.equal(value, states[2][name])}
    assert moved <= trained | {"heads.0.weight"}
    assert ("heads.0.weight" in moved) == ("frozen_heads" in knobs)
    assert moved & trained


def test_the_first_task_is_plain_fedavg():
    tasks, context = three_tasks()[:1], tiny_context()
    ours = learn_images(fot_of(), context, tasks).network.state_dict()
    theirs = learn_images(FedAvg(training=training(epochs=2)), context, tasks).network.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def second_round(
    method, context: Context, tasks: ImageTasks, bases: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model after one round of the second task with given bases, both from the same first model."""
    first, second = images_stream(tasks)
    start = learn_images(FedAvg(training=method.training), context, tasks[:1])
    server, client = method.server(context), method.client(context)
    server.load_state_dict(start.state_dict())
    server.start_task(first)
    server.bases = {basis_name(0, layer): basis for layer, basis in bases.items()}
    server.start_task(second)
    broadcast = server.broadcast(second, 0)
    for k, (images, labels) in enumerate(tasks[1]):
        message = turn(client, image_shard(k, 1, images, labels), broadcast)
        server.absorb(k, decoded(on_wire(message, method, context), context.dtype, CPU))
    server.finish_round()
    return server.network.state_dict()


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("clients", [1, 3])
def test_with_one_local_step_fot_and_fedprotip_are_one(clients):
    """No momentum, no weight decay, a single batch: P of the mean is the mean of P. With more steps they differ."""
    tasks = image_tasks(np.random.default_rng(0), [3, 2], [[20] * clients, [12] * clients])
    context = tiny_context()
    rng = torch.Generator().manual_seed(0)
    draw = {layer: torch.randn(d, d // 3, generator=rng, dtype=torch.float64) for layer, d in DIMENSIONS.items()}
    bases = {layer: torch.linalg.qr(A).Q.float() for layer, A in draw.items()}
    step = Training(rounds=1, epochs=1, batch_size=64, lr=0.05, momentum=0.0, weight_decay=0.0, augment="none")
    several = training(rounds=1)
    for knobs, same in ((step, True), (several, False)):
        ours = second_round(FOT(training=knobs, frozen_stages=1), context, tasks, bases)
        theirs = second_round(FedProTIP(training=knobs, frozen_stages=1), context, tasks, bases)
        for name in ("body.stage2.0.weight", "body.stage4.0.weight", "heads.1.weight"):
            assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6) == same, name
        assert torch.equal(ours["heads.0.weight"], theirs["heads.0.weight"])


def test_where_everything_is_protected_the_weights_do_not_move_at_all():
    tasks = image_tasks(np.random.default_rng(0), [3, 2], [[20, 20], [12, 12]])
    bases = {layer: torch.eye(d) for layer, d in DIMENSIONS.items()}
    context = tiny_context()
    method = fot_of()
    before = learn_images(FedAvg(training=method.training), context, tasks[:1]).network.state_dict()
    after = second_round(method, context, tasks, bases)
    assert all(torch.equal(after[name], before[name]) for name in before)


# Sketches and subspaces -----------------------------------------------------------------------------------------------


def first_task(method: FOT, context: Context, tasks: ImageTasks):
    """The server after one task, and the sketches."""
    sent: dict[int, Message] = {}
    server = learn_images(method, context, tasks[:1], seen=lambda k, _, message: sent.update({k: message}))
    return server, {k: message for k, message in sent.items() if stage_of(message) == "bases"}


@pytest.mark.parametrize("factor", [5.0, 1.0, 0.5])
def test_a_sketch_is_five_times_as_wide_as_its_layers_inputs(factor):
    _, sketches = first_task(fot_of({"rounds": 1, "epochs": 1}, sketch=factor), tiny_context(), three_tasks())
    assert sketches.keys() == {0, 1}
    for message in sketches.values():
        shapes = {layer: tuple(value.shape) for layer, value in message.items()}
        assert shapes == {layer: (d, round(factor * d)) for layer, d in DIMENSIONS.items()}
        assert message.nbytes == 4 * sum(d * round(factor * d) for d in DIMENSIONS.values())


def test_a_sketch_is_the_activations_times_a_standard_normal_matrix(monkeypatch):
    """Its columns have mean zero and the activations' second moment, X X'; clients draw their own."""
    context, tasks = linear_context(), image_tasks(np.random.default_rng(0), [2], [[30, 30]], size=3)
    tasks[0][1] = tasks[0][0]
    _, sketches = first_task(fot_of({"rounds": 1}, frozen_stages=0, sketch=400), context, tasks)
    scaled = (tasks[0][0][0].double().numpy() / 255 - 0.5) / 0.25
    X = scaled.reshape(30, -1).T
    for message in sketches.values():
        A = message["body.linear"].double().numpy()
        moment = A @ A.T / A.shape[1]
        assert np.linalg.norm(moment - X @ X.T) <= 0.05 * np.linalg.norm(X @ X.T)
        assert np.linalg.norm(A.mean(axis=1)) <= 0.05 * np.linalg.norm(X)
    assert not torch.equal(sketches[0]["body.linear"], sketches[1]["body.linear"])


@pytest.mark.parametrize("threshold", [0.8, 0.99])
def test_a_wide_sketch_of_activations_of_low_rank_gives_their_subspace(threshold):
    """One client whose pixels span four dimensions; with a wide sketch the spectrum is that of the activations."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 15, (4, 27)) * np.array([[4], [3], [2], [1]])
    amounts = rng.integers(0, 2, (40, 4))
    pixels = (amounts @ patterns).astype(np.uint8)
    images = torch.from_numpy(pixels.reshape(40, 3, 3, 3))
    tasks = [[(images, torch.arange(40) % 2)]]
    context = linear_context(mean=(0.0,) * 3, std=(1.0,) * 3)
    server, _ = first_task(fot_of({"rounds": 1}, frozen_stages=0, sketch=300, threshold=threshold), context, tasks)
    X = pixels.astype(np.float64).T / 255
    assert np.linalg.matrix_rank(X) == 4
    sigma = np.linalg.svd(X, compute_uv=False)[:4]
    # Energy, as in GPM and FOT.
    rank = 1 + int(np.argmax(np.cumsum(sigma**2) >= threshold * np.sum(sigma**2)))
    ours = server.bases["basis.0.body.linear"]
    assert ours.shape[1] == rank
    # Leading directions of the sketch lie in the range of the activations, and all of it is found.
    inside = oracle.projector(oracle.span(X, 1e-6))
    np.testing.assert_allclose(inside @ ours.double().numpy(), ours.double().numpy(), atol=1e-5)
    whole, _ = first_task(fot_of({"rounds": 1}, frozen_stages=0, sketch=300, threshold=1.0), context, tasks)
    assert whole.bases["basis.0.body.linear"].shape[1] == 4
    np.testing.assert_allclose(projector(bases_of(whole)["body.linear"]), inside, atol=1e-5)


def test_directions_that_are_rounding_of_the_wire_are_none():
    """Activations of rank four and the whole of the spectrum's sum: four directions, as the clients would find."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 2, (40, 4)) @ rng.integers(0, 60, (4, 27))
    images = torch.from_numpy(pixels.astype(np.uint8).reshape(40, 3, 3, 3))
    context = linear_context(mean=(0.0,) * 3, std=(1.0,) * 3)
    method = fot_of({"rounds": 1}, frozen_stages=0, threshold=1.0, mass="sum")
    server, _ = first_task(method, context, [[(images, torch.arange(40) % 2)]])
    assert server.bases["basis.0.body.linear"].shape[1] == 4


def test_the_server_uses_the_sum_of_the_sketches_alone():
    method, context, tasks = fot_of({"rounds": 1}), tiny_context(), three_tasks()[:1]
    server, sketches = first_task(method, context, tasks)
    uploads = {k: decoded(message, context.dtype, CPU) for k, message in sketches.items()}
    total = Message({layer: uploads[0][layer] + uploads[1][layer] for layer in DIMENSIONS})
    task = images_stream(tasks)[0]
    for dealt in ([(1, uploads[1]), (0, uploads[0])], [(4, total)]):
        other = method.server(context)
        other.start_task(task)
        other.broadcast(task, method.stages(task).index("bases"))
        for k, message in dealt:
            other.absorb(k, message)
        other.finish_round()
        for layer in DIMENSIONS:
            np.testing.assert_allclose(projector(bases_of(other)[layer]), projector(bases_of(server)[layer]), atol=1e-6)


@pytest.mark.slow
def test_shares_are_in_the_order_of_the_layers_however_the_network_calls_them(monkeypatch):
    """timm's Xception calls a block's layers in another order than it has them."""
    method = fot_of(columns=None, share_of="inputs")
    expected = learn_images(method, tiny_context(), three_tasks()).report()
    grams = fot.layer_grams
    monkeypatch.setattr(fot, "layer_grams", lambda *given: dict(reversed(grams(*given).items())))
    assert learn_images(method, tiny_context(), three_tasks()).report() == expected


@pytest.mark.slow
def test_bases_of_all_tasks_are_orthonormal_together():
    server = learn_images(fot_of(), tiny_context(), three_tasks())
    for layer, bases in bases_of(server).items():
        assert len(bases) == 3
        together = torch.cat(bases, dim=1).double().numpy()
        assert together.shape[1] > bases[0].shape[1]
        np.testing.assert_allclose(together.T @ together, np.eye(together.shape[1]), atol=1e-6), layer
    assert server.classify(TestBatch.of(three_tasks()[0][0][0])).tasks is None


def test_the_threshold_grows_by_a_step_a_task_up_to_one():
    method = FOT(threshold_step=0.01)
    assert [round(method.epsilon(t), 10) for t in (0, 1, 5, 13, 40)] == [0.87, 0.88, 0.92, 1.0, 1.0]
    assert [round(FedProTIP().epsilon(t), 10) for t in (0, 1, 10)] == [0.7, 0.701, 0.71]


# Whole runs -----------------------------------------------------------------------------------------------------------

SMALL = (*(choice for choice in SMALL if choice != "method=fedprotip"), "method=fot", "tasks=2")


@pytest.mark.slow
def test_a_run_counts_models_and_sketches(tmp_path):
    outcome = run_in(tmp_path, *SMALL)
    uploads = pd.read_csv(outcome.folder / "uploads.csv")
    assert set(uploads.stage) == set(outcome.record["communication"]["by_stage"]) == {"model", "bases"}
    sketches = uploads[uploads.stage == "bases"]
    # New heads train freely, so that their inputs need no sketch.
    body = {layer: d for layer, d in DIMENSIONS.items() if layer != HEADS}
    assert (sketches.up_bytes == 4 * 5 * sum(d * d for d in body.values())).all()
    assert outcome.record["routing"] is None
    assert outcome.record["protocol"] == "task-agnostic"
    assert outcome.record["report"]["dimensions"] == body


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("method.sketch=0", "method.sketch=0.0 is out of range (a finite number above 0)"),
        ("method.frozen_stages=9", "method.frozen_stages=9 is more than the network has (at most 4"),
    ],
)
def test_wrong_knobs_are_one_line_and_exit_code_2(command, tmp_path, typed, told):
    code, _, err = command(*(c for c in SMALL if c.split("=")[0] != typed.split("=")[0]), typed, f"out={tmp_path}")
    assert code == 2
    [line] = err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    "knobs",
    [{"sketch": float("inf")}, {"sketch": -1}, {"sketch": None}, {"mass": "all"}, {"threshold": 2}, {"tip": False}],
    ids=str,
)
def test_other_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(FOT, knobs, "method")


def test_a_sketch_that_no_memory_holds_is_one_line_and_exit_code_2(command, tmp_path):
    assert command(*SMALL, "method.sketch=1e9", f"out={tmp_path}")[0] == 2


def test_a_full_layer_is_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        server = learn_images(
            fot_of({"rounds": 1}, threshold=0.9999999, threshold_step=0.0), tiny_context(), three_tasks()
        )
    assert sum(server.report()["ranks"]["body.stage2.0"]) == 36
    assert caplog.text.count("all 36 directions of body.stage2.0 are protected") == 1
