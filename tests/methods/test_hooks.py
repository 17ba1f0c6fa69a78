"""The hooks of the gradient methods, each with a method made for the purpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import MODEL, GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.fields import counts
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network
from fcl_bench.training.objective import Objective
from tests.methods.training_harness import federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import assert_resumes, model_of, same

SIZES = [[9, 6, 0], [8, 0, 7], [6, 6, 6]]


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.5, **knobs})


def tasks():
    return image_tasks(np.random.default_rng(0), [2, 2, 2], SIZES)


def learnt(method: GradientMethod, **options):
    """The federation after all tasks."""
    federation = federation_of(method, tiny_context(**options), tasks())
    federation.run(lambda _: None)
    return federation


# --- client memory, and what a round trains on (H2, H3, H10) ---


class RememberingClient(GradientClient):
    """Keeps the first samples of each task, and replays them beside its own."""

    def samples(self, client_data, broadcast, state):
        own = super().samples(client_data, broadcast, state)
        old = [name for name in state if name.startswith("images.") and name != f"images.{client_data.task}"]
        if not old or not self.method.replays:
            return own
        inputs = torch.cat([own.inputs, *(state[name] for name in old)])
        labels = torch.cat([own.labels, *(state[name.replace("images", "labels")] for name in old)])
        return Samples(inputs, labels)

    def remember(self, client_data, broadcast, state):
        kept = {
            f"images.{client_data.task}": client_data.inputs[:2],
            f"labels.{client_data.task}": client_data.labels[:2],
        }
        return {**state, **kept}


@dataclass
class Remembering(GradientMethod):
    name: ClassVar[str] = "remembering"
    training: Training = field(default_factory=training)
    loss_classes: str = "seen"  # what is replayed is of old classes
    replays: bool = True

    def client(self, context):
        return RememberingClient(self, context)


@pytest.mark.slow
def test_a_client_keeps_its_own_memory_and_nobody_elses():
    federation = learnt(Remembering())
    kept = federation.transport.state_dict()
    for task, sizes in enumerate(SIZES):
        for client, size in enumerate(sizes):
            assert (f"{client}.images.{task}" in kept) == (size > 0)
            if size:
                client_data = federation.transport.everything.client_data(task, client)
                assert torch.equal(kept[f"{client}.images.{task}"], client_data.inputs[:2])
    # Client 0 and 1 keep two images of 3 x 8 x 8 bytes in three and two tasks, with labels of 8 bytes.
    assert federation.state.client_storage_bytes == {"images": 3 * 2 * 192, "labels": 3 * 2 * 8}


@pytest.mark.slow
def test_memory_that_is_not_replayed_changes_nothing():
    assert same(model_of(learnt(Remembering(replays=False))), model_of(learnt(FedAvg(training(), loss_classes="seen"))))
    assert not same(model_of(learnt(Remembering())), model_of(learnt(FedAvg(training(), loss_classes="seen"))))


@pytest.mark.slow
def test_memory_survives_a_checkpoint():
    whole, _ = assert_resumes(lambda: federation_of(Remembering(), tiny_context(), tasks()))
    assert whole.state.client_storage_bytes["images"] > 0


# --- a teacher (H4) ---


class Taught(Objective):
    def __init__(self, heads, teacher, seen):
        super().__init__(heads)
        self.teacher, self.seen = teacher, seen

    def loss(self, network, images, labels):
        loss = super().loss(network, images, labels)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            wanted = self.teacher(images)
        self.seen.append(wanted)
        return loss + (network(images)[:, : wanted.shape[1]] - wanted).square().mean()


class TaughtClient(GradientClient):
    def __init__(self, method, context):
        super().__init__(method, context)
        self.seen, self.teachers = [], {}

    def objective(self, client_data, broadcast, state):
        from fcl_bench.training.network import Heads

        teacher = self.teacher(client_data, broadcast)
        self.teachers[client_data.task] = teacher
        return Taught(Heads.from_message(broadcast), teacher, self.seen)


@dataclass
class Taughtful(GradientMethod):
    name: ClassVar[str] = "taught"
    keeps_teacher: ClassVar[bool] = True
    training: Training = field(default_factory=training)

    def client(self, context):
        return TaughtClient(self, context)


@pytest.mark.slow
def test_the_teacher_is_the_model_with_which_the_last_task_ended():
    federation = federation_of(Taughtful(), tiny_context(), tasks())
    ends = []
    federation.run(lambda done: ends.append(model_of(done)))
    client = federation.transport._node.client
    assert client.teachers[0] is None
    for task in (1, 2):
        teacher = client.teachers[task]
        assert same(teacher.state(), ends[task - 1])
        assert not teacher.training
        assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert client.seen[0].shape[1] == 2
    assert client.seen[-1].shape[1] == 4


@pytest.mark.slow
def test_the_teacher_goes_down_once_for_each_client_and_task_and_never_up():
    taught, plain = learnt(Taughtful()), learnt(FedAvg(training(), loss_classes="seen"))
    by = {"taught": taught, "plain": plain}
    down = {name: {(r.task, r.round, r.client): r.down_bytes for r in f.state.ledger.uploads} for name, f in by.items()}
    up = {name: [r.up_bytes for r in f.state.ledger.uploads] for name, f in by.items()}
    assert up["taught"] == up["plain"]
    for key, size in down["plain"].items():
        task, round_, client = key
        known = [name for name in model_of(plain) if name.startswith("body.") or int(name.split(".")[1]) < task]
        model = sum(model_of(plain)[name].nbytes for name in known)
        once = model if task and round_ == 0 and SIZES[task][client] else 0
        assert down["taught"][key] == size + once


@pytest.mark.slow
def test_a_teacher_survives_an_interruption_within_its_task():
    assert_resumes(lambda: federation_of(Taughtful(), tiny_context(), tasks()))


def test_a_frozen_copy_stays_what_it_was_and_has_the_heads_of_its_values():
    federation = learnt(FedAvg(training(), loss_classes="seen"))
    client = federation.transport._node.client
    now = {name: value.clone() for name, value in client.network.state().items()}
    earlier = {name: value + 1 for name, value in now.items() if not name.startswith("heads.2")}
    copied, old = client.frozen_copy(), client.frozen_copy(earlier)
    assert same(copied.state(), now)
    assert same(old.state(), earlier)
    assert [head.out_features for head in old.heads] == [2, 2]
    for network in (copied, old):
        assert not any(module.training for module in network.modules())
        assert not any(parameter.requires_grad for parameter in network.parameters())
    with torch.no_grad():
        for parameter in client.network.parameters():
            parameter += 5
    assert same(copied.state(), now)
    assert same(old.state(), earlier)


# --- a server step, weights by client, stages before the model's rounds (H5, H6, H7) ---


class SteppingServer(GradientServer):
    def server_step(self):
        noise = torch.randn(())
        self.method.drawn.append(float(noise))
        with torch.no_grad():
            self.network.heads[-1].bias += self.method.size * noise


@dataclass
class Stepping(GradientMethod):
    name: ClassVar[str] = "stepping"
    training: Training = field(default_factory=training)
    size: float = 0.0
    drawn: list = field(default_factory=list)

    def server(self, context):
        return SteppingServer(self, context)


@pytest.mark.slow
def test_the_server_steps_after_each_average_with_draws_that_follow_from_the_seed():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = Stepping(size=1.0), Stepping(size=1.0)
    model = model_of(learnt(first))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    assert same(model_of(learnt(second)), model)
    assert first.drawn == second.drawn
    assert len(set(first.drawn)) == 2 * 3
    assert not same(model, model_of(learnt(Stepping())))
    assert same(model_of(learnt(Stepping())), model_of(learnt(FedAvg(training()))))


class WeighingServer(GradientServer):
    def weight(self, client, upload):
        return self.method.weights[client]


@dataclass
class Weighing(GradientMethod):
    name: ClassVar[str] = "weighing"
    training: Training = field(default_factory=training)
    weights: tuple = (1.0, 1.0, 1.0)

    def server(self, context):
        return WeighingServer(self, context)


@pytest.mark.slow
def test_a_client_counts_in_the_average_what_the_method_says():
    uniform = model_of(learnt(FedAvg(training(weighting="uniform"))))
    assert same(model_of(learnt(Weighing())), uniform)
    once = training(rounds=1)
    only = learnt(Weighing(once, weights=(1.0, 0.0, 0.0)))
    # With all the weight on client 0, the first task's model is that client's own.
    [[own, *others]] = tasks()[:1]
    alone = federation_of(FedAvg(once), tiny_context(), [[own, *((x[:0], y[:0]) for x, y in others)]])
    alone.run(lambda _: None)
    first = federation_of(Weighing(once, weights=(1.0, 0.0, 0.0)), tiny_context(), tasks()[:1])
    first.run(lambda _: None)
    assert same(model_of(first), model_of(alone))
    assert not same(model_of(only), uniform)


class CountingClient(GradientClient):
    def answer(self, client_data, broadcast, state):
        return Message({"classes": torch.bincount(client_data.labels, minlength=6)}), state


class CountingServer(GradientServer):
    def absorb_answer(self, client, upload):
        self.method.seen.append((client, upload.stage, upload["classes"].tolist()))


@dataclass
class Counting(GradientMethod):
    name: ClassVar[str] = "counting"
    training: Training = field(default_factory=training)
    seen: list = field(default_factory=list)

    def stages(self, task):
        return ["counts", *super().stages(task)]

    def uploads(self, context):
        return {**super().uploads(context), "counts": {"classes": counts(6)}}

    def client(self, context):
        return CountingClient(self, context)

    def server(self, context):
        return CountingServer(self, context)


@pytest.mark.slow
def test_a_stage_before_the_models_rounds_shifts_no_schedule():
    """Cosine rates, a random half of the clients in each round: the model is fedavg's, bit for bit."""
    knobs = training(rounds=3, schedule="cosine", fraction=0.5)
    method = Counting(knobs)
    federation = learnt(method)
    assert same(model_of(federation), model_of(learnt(FedAvg(knobs))))
    assert [row[:2] for row in method.seen[:2]] == [(0, "counts"), (1, "counts")]
    stages = [row.stage for row in federation.state.ledger.uploads if row.task == 0 and row.client == 0]
    assert stages == ["counts", MODEL, MODEL, MODEL]


# --- a network of the method's own (H9) ---


class Prompted(Network):
    """Adds one trainable vector to the features."""

    def __init__(self, start):
        super().__init__(start)
        self.prompt = torch.nn.Parameter(torch.zeros(start.dimension))
        for parameter in self.body.parameters():
            parameter.requires_grad_(False)
        self.never_trains = {name for name, value in self.named_parameters() if not value.requires_grad}

    def logits(self, features):
        return super().logits(features + self.prompt)


@dataclass
class Prompting(GradientMethod):
    name: ClassVar[str] = "prompting"
    training: Training = field(default_factory=training)

    def build_network(self, context):
        return Prompted(self.start(context))


def test_a_method_builds_its_own_network_and_only_what_trains_travels():
    federation = learnt(Prompting())
    server = federation.server
    assert server.network.prompt.abs().max() > 0
    heads = {f"heads.{task}.{kind}" for task in range(3) for kind in ("weight", "bias")}
    assert set(server.network.changing()) == {"prompt", *heads}
    features = server.context.inputs
    first = next(row for row in federation.state.ledger.uploads if row.up_bytes)
    assert first.up_bytes == 4 * (features + 2 * features + 2) + 8


@pytest.mark.slow
def test_parameters_of_the_methods_own_survive_a_checkpoint_and_are_part_of_the_model():
    whole, _ = assert_resumes(lambda: federation_of(Prompting(), tiny_context(), tasks()))
    assert whole.server.network_tensors["prompt"].any()
    assert torch.equal(whole.server.model()["prompt"], whole.server.network_tensors["prompt"])


def test_training_on_features_is_training_on_a_network_without_a_body():
    """Softmax regression by hand: one client, whole batches, no momentum."""
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((12, 5)), np.arange(12) % 3
    knobs = Training(rounds=4, epochs=1, batch_size=12, lr=0.5, weight_decay=0.01, augment="none")
    method = FedAvg(knobs, trains="features")
    assert not method.trains_network
    context = tiny_context()
    context = type(context)(5, 0, torch.float64, context.device, context.wire)
    federation = federation_of(method, context, [[(torch.from_numpy(X), torch.from_numpy(y))]])
    start = method.server(context)
    start.start_task(federation.stream.tasks[0])
    W = start.network.heads[0].weight.detach().numpy().astype(float)
    b = np.zeros(3)
    Y = np.eye(3)[y]
    for _ in range(4):
        scores = X @ W.T + b
        P = np.exp(scores - scores.max(axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        W, b = W - 0.5 * ((P - Y).T @ X / 12 + 0.01 * W), b - 0.5 * ((P - Y).mean(axis=0) + 0.01 * b)
    federation.run(lambda _: None)
    head = federation.server.network.heads[0]
    np.testing.assert_allclose(head.weight.detach().numpy(), W, atol=1e-5)
    np.testing.assert_allclose(head.bias.detach().numpy(), b, atol=1e-5)
