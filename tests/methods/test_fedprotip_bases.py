"""FedProTIP's bases and sketches: what they span, what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import decoded
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.protocol.context import Context, TestBatch
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server
from tests.methods import fedprotip_oracle as oracle
from tests.methods.fedprotip_harness import (
    HEADS,
    bases_of,
    copy_of,
    fedprotip_of,
    observed,
    projector,
    stage_of,
    three_tasks,
)
from tests.methods.training_harness import (
    CPU,
    ImageTasks,
    image_tasks,
    images_stream,
    learn_image_task,
    tiny_context,
)


def test_a_tiny_threshold_keeps_one_direction_of_each_client():
    result = observed(
        fedprotip_of({"rounds": 1, "epochs": 1}, threshold=1e-9, threshold_step=0.0), tiny_context(), three_tasks()
    )
    for (_, stage, _), message in result.uploads.items():
        if stage == "bases":
            assert {columns.shape[1] for columns in message.values()} == {1}
    for layer, ranks in result.server.report()["ranks"].items():
        assert all(1 <= rank <= present for rank, present in zip(ranks, [2, 2, 3], strict=True)), layer


@pytest.mark.parametrize("wire", ["float32", "float64"])
def test_the_servers_bases_are_orthonormal_and_span_the_union_of_the_clients(wire):
    """Proposition 1, per task and layer, beside what was known; in float32, as kept."""
    result = observed(fedprotip_of({"epochs": 1}, threshold=0.4), tiny_context(wire=wire), three_tasks())
    server = result.server
    assert list(server.widths()) == ["body.stage2.0", "body.stage3.0", "body.stage4.0", HEADS]
    for layer, bases in bases_of(server).items():
        assert all(basis.dtype == torch.float32 for basis in bases)
        together = torch.cat(bases, dim=1).double().numpy()
        np.testing.assert_allclose(together.T @ together, np.eye(together.shape[1]), atol=1e-6)
        before = np.zeros((len(together), 0))
        for task, basis in enumerate(bases):
            sent = [message for (of, stage, _), message in result.uploads.items() if (of, stage) == (task, "bases")]
            union = oracle.union([before, *(message[layer].double().numpy() for message in sent)], tolerance=1e-4)
            now = np.concatenate([before, basis.double().numpy()], axis=1)
            assert now.shape == union.shape
            np.testing.assert_allclose(oracle.projector(now), oracle.projector(union), atol=1e-4)
            # What is sent is orthonormal, and new.
            for message in sent:
                U = message[layer].double().numpy()
                np.testing.assert_allclose(U.T @ U, np.eye(U.shape[1]), atol=1e-6)
                np.testing.assert_allclose(before.T @ U, 0, atol=1e-6)
            before = now
    ranks = {layer: [basis.shape[1] for basis in bases] for layer, bases in bases_of(server).items()}
    assert server.report() == {"ranks": ranks, "dimensions": dict(zip(ranks, [36, 72, 144, 32], strict=True))}


def last_stage(method: FedProTIP, context: Context, tasks: ImageTasks, stage: str):
    """Uploads of a stage of the last task, and a function that has a server in the state before them take in others."""
    server, kept, state = method.server(context), {}, {}
    stream = images_stream(tasks)

    def seen(k, broadcast, message):
        if stage_of(message) == stage and server.task == len(tasks) - 1:
            if not state:
                state.update(copy_of(server.state_dict()))
            kept[k] = decoded(message, context.dtype, CPU)

    for task, clients in zip(stream, tasks, strict=True):
        learn_image_task(method, context, server, task, clients, seen=seen)
    round_ = method.stages(stream[-1]).index(stage)

    def after(uploads: list[tuple[int, Message]]) -> Server:
        other = method.server(context)
        other.load_state_dict(state)
        other.start_task(stream[-1])
        other.broadcast(stream[-1], round_)
        for k, message in uploads:
            other.absorb(k, message)
        other.finish_round()
        return other

    return kept, after


@pytest.mark.parametrize("sketch", [None, 60])
def test_the_order_of_the_clients_does_not_matter(sketch):
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[16, 16, 16], [16, 16, 16]])
    kept, after = last_stage(fedprotip_of({"rounds": 1}, sketch=sketch), tiny_context(), tasks, "bases")
    one = after([(k, kept[k]) for k in (0, 1, 2)])
    other = after([(k, kept[k]) for k in (2, 0, 1)])
    for layer in one.widths():
        assert one.report()["ranks"][layer][1] > 0
        np.testing.assert_allclose(projector(bases_of(one)[layer]), projector(bases_of(other)[layer]), atol=1e-5)


def test_of_sketches_the_server_uses_the_sum_alone():
    """Secure aggregation: however the same sum is dealt to the clients, the subspaces are the same."""
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[16, 16, 16], [16, 16, 16]])
    method, context = fedprotip_of({"rounds": 1}, sketch=30), tiny_context()
    kept, after = last_stage(method, context, tasks, "bases")
    one = after(list(kept.items()))
    total = Message({layer: sum(message[layer] for message in kept.values()) for layer in kept[0]})
    mask = {
        layer: torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=value.dtype)
        for layer, value in kept[0].items()
    }
    masked = [
        (0, Message({layer: value + mask[layer] for layer, value in kept[0].items()})),
        (1, Message({layer: value - mask[layer] for layer, value in kept[1].items()})),
        (2, kept[2]),
    ]
    for other in (after([(2, total)]), after(masked)):
        assert other.report() == one.report()
        for layer in one.widths():
            np.testing.assert_allclose(projector(bases_of(one)[layer]), projector(bases_of(other)[layer]), atol=1e-6)


@pytest.mark.parametrize(("wire", "atol", "width"), [("float64", 1e-6, 144), ("float32", 2e-3, "layer")])
def test_wide_sketches_give_the_span_of_the_bases(wire, atol, width):
    """The first task, whose activations do not depend on the way; 144 columns are the most that any layer has."""
    tasks, context = three_tasks()[:1], tiny_context(wire=wire)
    plain = observed(fedprotip_of({"rounds": 1}, threshold=0.4), context, tasks)
    sketched = observed(fedprotip_of({"rounds": 1}, threshold=0.4, sketch=width), context, tasks)
    assert sketched.server.report() == plain.server.report()
    for layer in plain.server.widths():
        ours, theirs = projector(bases_of(sketched.server)[layer]), projector(bases_of(plain.server)[layer])
        np.testing.assert_allclose(ours, theirs, atol=atol)
    for layer, bases in bases_of(sketched.server).items():
        together = torch.cat(bases, dim=1).double().numpy()
        np.testing.assert_allclose(together.T @ together, np.eye(together.shape[1]), atol=1e-6), layer


def test_a_narrow_sketch_keeps_as_many_directions_as_it_has_columns():
    result = observed(fedprotip_of({"rounds": 1}, sketch=2, threshold=0.9), tiny_context(), three_tasks())
    assert all(rank <= 2 for ranks in result.server.report()["ranks"].values() for rank in ranks)
    assert max(leak for *_, leak in result.clients) <= 1e-5


def test_uploads_have_the_bytes_counted_by_hand():
    dimensions = {"body.stage2.0": 36, "body.stage3.0": 72, "body.stage4.0": 144, HEADS: 32}
    for sketch in (None, 40):
        result = observed(fedprotip_of({"rounds": 1, "epochs": 1}, sketch=sketch), tiny_context(), three_tasks())
        for (task, stage, k), message in result.uploads.items():
            if stage == "references":
                assert message.nbytes == 4 * (task + 1)
            elif stage == "bases" and sketch:
                assert message.nbytes == 4 * (36 * 36 + 72 * 40 + 144 * 40 + 32 * 32), k
            elif stage == "bases":
                assert {layer: len(U) for layer, U in message.items()} == dimensions
                assert message.nbytes == 4 * sum(dimensions[layer] * U.shape[1] for layer, U in message.items())
            else:
                body = [3 * 4 * 9, 4 * 8 * 9, 8 * 16 * 9, 16 * 32 * 9]
                norms = 4 * (4 + 8 + 16 + 32)
                whole = sum(body) + norms + 3 * 33  # first task: all, with a head of 3 classes
                later = sum(body[1:]) + 2 * 32  # then the projected weights
                assert message.nbytes == 4 * (later if task else whole) + 8


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_task_without_any_labelled_sample_adds_no_direction(missing):
    """As label_rate can leave it, in a data set whose classes have different sizes; fedavg takes it."""
    tasks = image_tasks(np.random.default_rng(0), [2, 2, 2], [[10, 10]] * 3)
    stream, method, context = images_stream(tasks), fedprotip_of({"rounds": 1, "epochs": 1}), tiny_context()
    tasks[missing] = [(images[:0], labels[:0]) for images, labels in tasks[missing]]
    server = method.server(context)
    for task, clients in zip(stream, tasks, strict=True):
        learn_image_task(method, context, server, task, clients)
        black = TestBatch.of(torch.zeros(3, 3, 8, 8, dtype=torch.uint8))
        assert server.classify(black).scores.shape == (3, task.columns_seen)
    assert all(ranks[missing] == 0 for ranks in server.report()["ranks"].values())
