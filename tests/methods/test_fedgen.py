"""FedGen: both losses against plain NumPy, the generator's limits, messages, and what a resumed run needs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.methods.gradient.fedgen import COUNTS, FedGen, Generated, Generation, shares, teaching_loss
from fcl_bench.methods.gradient.finetune import FineTune
from fcl_bench.methods.gradient.half import MODEL
from fcl_bench.training.generators.features import FeatureGenerator, KeptAdam, similarity
from fcl_bench.training.heads import Heads
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network, feature_start
from tests.methods import fedgen_oracle as oracle
from tests.methods.harness import turn
from tests.methods.training_harness import (
    CPU,
    feature_tasks,
    federation_of,
    image_shard,
    image_tasks,
    images_stream,
    tiny_problem,
)

SIZES = [[9, 6, 0], [8, 1, 7], [6, 6, 6]]
PLAIN = (None, None)


def training(**knobs) -> Training:
    return Training(**{"rounds": 3, "epochs": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.5, **knobs})


def fedgen(on: str = "images", generator: dict | None = None, knobs: dict | None = None, **own) -> FedGen:
    return FedGen(training(**(knobs or {})), generator=Generation(**{"steps": 5, **(generator or {})}), on=on, **own)


def tasks_and_problem(on: str):
    if on == "images":
        return image_tasks(np.random.default_rng(0), [2, 2, 2], SIZES), tiny_problem()
    return feature_tasks(0, [2, 2, 2], SIZES), dataclasses.replace(tiny_problem(), inputs=6, network=None)


def learnt(method, on: str):
    tasks, problem = tasks_and_problem(on)
    federation = federation_of(method, problem, tasks)
    federation.run(lambda _: None)
    return federation


def model_of(federation) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in federation.server.network.state().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def made_generator(dimension: int = 4, hidden: int = 7, noise: int = 3, classes: int = 5) -> FeatureGenerator:
    generator = FeatureGenerator(dimension, hidden, noise, seed=3)
    generator.grow(classes)
    return generator.double()


def plain(generator: FeatureGenerator) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in generator.state().items()}


# The server's loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_the_generator_is_two_linear_layers_on_the_class_and_noise(mode):
    generator, rng = made_generator(), np.random.default_rng(0)
    generator.norm.running_mean.copy_(torch.from_numpy(rng.standard_normal(7)))
    generator.norm.running_var.copy_(torch.from_numpy(rng.uniform(0.5, 2, 7)))
    labels, noise = rng.integers(0, 5, 9), rng.standard_normal((9, 3))
    expected = oracle.generate(plain(generator), labels, noise, mode)
    found = generator.train(mode)(torch.from_numpy(labels), torch.from_numpy(noise))
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-12)


def hand_heads() -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Two clients of three classes; the first knows nothing of class 2, the second nothing of class 0."""
    first = np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.5]]), np.array([0.1, 0.0, -0.2])
    second = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, -1.0]]), np.array([0.0, 0.3, 0.0])
    return [first, second], np.array([[4, 1, 0], [0, 3, 2]])


def test_the_teaching_loss_and_its_gradient_are_those_of_the_equation_on_two_hand_heads():
    heads, counts = hand_heads()
    G, labels = np.array([[0.5, -1.0], [2.0, 0.3], [-0.7, 0.9], [0.0, 0.0]]), np.array([0, 1, 2, 1])
    expected, gradient = oracle.teaching(G, labels, heads, counts)
    made = torch.from_numpy(G).requires_grad_()
    weights, biases = (torch.from_numpy(np.stack([head[i] for head in heads])) for i in (0, 1))
    omega = shares(torch.from_numpy(counts))
    loss = teaching_loss(made, torch.from_numpy(labels), weights, biases, omega, PLAIN)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(made.grad.numpy(), gradient, atol=1e-12)
    # Class 0 is the first client's alone, whose first row says (1, 0): by hand.
    p = np.exp([0.5 + 0.1, -2.0, -0.5 - 0.5 - 0.2])
    by_hand = -np.log(p[0] / p.sum())
    alone = teaching_loss(made[:1], torch.tensor([0]), weights, biases, omega, PLAIN)
    assert alone.item() == pytest.approx(by_hand, abs=1e-12)


def test_the_teaching_gradient_is_that_of_finite_differences():
    heads, counts = hand_heads()
    labels, step = np.array([2, 1, 0]), 1e-6
    G = np.random.default_rng(1).standard_normal((3, 2))
    _, gradient = oracle.teaching(G, labels, heads, counts)
    weights, biases = (torch.from_numpy(np.stack([head[i] for head in heads])) for i in (0, 1))
    omega = shares(torch.from_numpy(counts))

    def at(moved: np.ndarray) -> float:
        return teaching_loss(torch.from_numpy(moved), torch.from_numpy(labels), weights, biases, omega, PLAIN).item()

    for place in np.ndindex(G.shape):
        nudge = np.zeros_like(G)
        nudge[place] = step
        assert (at(G + nudge) - at(G - nudge)) / (2 * step) == pytest.approx(gradient[place], abs=1e-8)


def test_only_logits_that_compete_teach():
    """Two heads of two classes each; over the task's, the second head alone has a say."""
    rng = np.random.default_rng(2)
    W, b, made = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 4)), rng.standard_normal((6, 5))
    labels, counts = rng.integers(2, 4, 6), rng.integers(1, 9, (3, 2))
    own = [(W[k, 2:], b[k, 2:]) for k in range(3)]
    expected, _ = oracle.teaching(made, labels - 2, own, counts)
    omega = torch.zeros(3, 4, dtype=torch.float64)
    omega[:, 2:] = shares(torch.from_numpy(counts))
    competition = Heads(((0, 1), (2, 3)), (2, 3)).competition("task")
    arrays = [torch.from_numpy(array) for array in (made, labels, W, b)]
    assert teaching_loss(*arrays, omega, competition).item() == pytest.approx(expected, abs=1e-12)


def test_each_classes_shares_sum_to_one_and_absent_classes_have_none():
    held = torch.tensor([[3, 0, 0, 7], [1, 5, 0, 0], [0, 5, 0, 0]])
    omega = shares(held)
    torch.testing.assert_close(omega.sum(dim=0), torch.tensor([1.0, 1.0, 0.0, 1.0]).double())
    assert omega[0].tolist() == [0.75, 0.0, 0.0, 1.0]


def test_the_diversity_is_that_of_the_equation_and_one_only_without_any():
    rng = np.random.default_rng(3)
    noise, made = rng.standard_normal((7, 3)), rng.standard_normal((7, 5))

    def found(noise, made):
        return similarity(torch.from_numpy(noise), torch.from_numpy(made)).item()

    assert found(noise, made) == pytest.approx(oracle.diversity(noise, made), abs=1e-14)
    assert 0 < found(noise, 10 * made) < found(noise, made) < 1
    assert found(np.repeat(noise[:1], 7, axis=0), made) == 1
    assert found(noise, np.repeat(made[:1], 7, axis=0)) == 1
    # By hand: a mean square of (1 + 9) / 2, a mean distance of 3, in two of four pairs.
    assert found(np.array([[0.0, 0.0], [1.0, 3.0]]), np.array([[1.0], [4.0]])) == pytest.approx(np.exp(-7.5))


def test_one_clients_head_alone_teaches_the_generator_its_classes():
    """L_teach by itself drives argmax(W G(y, eps)) to y, whatever the noise."""
    torch.manual_seed(0)
    generator = FeatureGenerator(6, 16, 4, seed=1)
    generator.grow(4)
    W, b, omega = torch.randn(1, 4, 6), torch.zeros(1, 4), torch.ones(1, 4)
    labels = torch.arange(4).repeat(16)

    def right() -> float:
        generator.eval()
        with torch.no_grad():
            made, _ = generator.draw(labels)
        generator.train()
        return ((made @ W[0].T).argmax(dim=1) == labels).float().mean().item()

    before, adam = right(), KeptAdam()
    for _ in range(6):
        optimiser = adam.begin(generator, 0.01, 0.0)
        for _ in range(25):
            made, _ = generator.draw(labels)
            optimiser.zero_grad()
            teaching_loss(made, labels, W, b, omega, PLAIN).backward()
            optimiser.step()
        adam.keep(generator, optimiser)
    assert before < 0.6
    assert right() == 1


# Adam and growth ------------------------------------------------------------------------------------------------------


def test_adam_goes_on_across_rounds_as_one_optimiser_would():
    def steps(rounds: list[int]) -> dict[str, torch.Tensor]:
        generator, adam = made_generator(), KeptAdam()
        draws = torch.Generator().manual_seed(5)
        for count in rounds:
            resumed = KeptAdam()
            resumed.load_state_dict({name: value.clone() for name, value in adam.state_dict().items()})
            optimiser = resumed.begin(generator, 0.01, 0.1)
            for _ in range(count):
                optimiser.zero_grad()
                noise = torch.randn(6, 3, generator=draws, dtype=torch.float64)
                generator(torch.arange(6) % 5, noise).square().sum().backward()
                optimiser.step()
            resumed.keep(generator, optimiser)
            adam = resumed
        return generator.state()

    assert same(steps([6]), steps([2, 3, 1]))
    assert not same(steps([6]), steps([5]))


def test_new_classes_leave_old_rows_and_their_moments_as_they_were():
    generator, adam = made_generator(classes=2), KeptAdam()
    optimiser = adam.begin(generator, 0.01, 0.0)
    generator(torch.tensor([0, 1, 1]), torch.ones(3, 3, dtype=torch.float64)).sum().backward()
    optimiser.step()
    adam.keep(generator, optimiser)
    rows, moments = generator.classes.detach().clone(), adam.state_dict()["classes.exp_avg"].clone()
    generator.grow(5)
    assert generator.classes.shape == (5, 7)
    assert torch.equal(generator.classes[:2], rows)
    assert len({tuple(row.tolist()) for row in generator.classes}) == 5
    again = adam.begin(generator, 0.01, 0.0).state[generator.classes]
    assert torch.equal(again["exp_avg"], torch.cat([moments, torch.zeros(3, 7, dtype=torch.float64)]))


# One step of each half ------------------------------------------------------------------------------------------------


def stepped_server(tasks, problem, method):
    """The server before and after its first average, with the uploads that it took in."""
    server, client = method.server(problem), method.client(problem)
    [task] = images_stream(tasks)
    server.start_task(task)
    uploads = {}
    for round_ in range(2):
        broadcast = server.broadcast(task, round_)
        for k, parts in enumerate(tasks[0]):
            upload = turn(client, image_shard(k, 0, *parts), broadcast)
            uploads[k] = {**uploads.get(k, {}), **{name: value.double().numpy() for name, value in upload.items()}}
            server.absorb(k, upload)
        if round_ == 0:
            server.finish_round()
            before = plain(server.generator)
        else:
            server.finish_round()
    return server, before, uploads


def test_one_server_step_is_adams_on_the_oracles_loss():
    """The gradient of a single step by finite differences of the oracle's whole loss; Adam's first step by hand."""
    tasks, problem = feature_tasks(4, [3], [[12, 9]], inputs=4), dataclasses.replace(tiny_problem(), inputs=4)
    knobs = {"steps": 1, "hidden": 5, "noise": 2, "lr": 0.01, "weight_decay": 0.1}
    method = fedgen("features", knobs, {"batch_size": 8})
    recorded = []
    draw = FeatureGenerator.draw

    def recording(self, labels, generator=None):
        made, noise = draw(self, labels, generator)
        recorded.append((labels.numpy(), noise.double().numpy(), self.training))
        return made, noise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureGenerator, "draw", recording)
        server, before, uploads = stepped_server(tasks, problem, method)
    [(labels, noise, trained)] = recorded
    assert trained
    counts = np.stack([np.bincount(y.numpy(), minlength=3) for _, y in tasks[0]])
    for k in (0, 1):
        assert uploads[k]["counts"].tolist() == counts[k].tolist()
    heads = [(uploads[k]["heads.0.weight"], uploads[k]["heads.0.bias"]) for k in (0, 1)]
    before = {name: value.astype(float) for name, value in before.items()}

    def total(G) -> float:
        made = oracle.generate(G, labels, noise, True)
        return oracle.teaching(made, labels, heads, counts)[0] + oracle.diversity(noise, made)

    after = plain(server.generator)
    for name in ("classes", "noise.weight", "norm.weight", "norm.bias", "out.weight", "out.bias"):
        gradient = np.zeros_like(before[name])
        for place in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                moved = before[name].copy()
                moved[place] += sign * 1e-5
                ends.append(total({**before, name: moved}))
            gradient[place] = (ends[0] - ends[1]) / 2e-5
        gradient += 0.1 * before[name]
        # Adam's first step is lr g / (|g| + 1e-8): its moments say more, since they are g's size.
        moments = server.state_dict()[f"generator_adam.{name}.exp_avg"].numpy()
        np.testing.assert_allclose(moments, 0.1 * gradient, atol=2e-6, err_msg=name)
        far = np.abs(gradient) > 1e-4
        np.testing.assert_allclose((before[name] - after[name])[far], 0.01 * np.sign(gradient[far]), rtol=1e-3)


def objective_at(generator, available, alpha=3.0, beta=2.0, steps=10, count=6) -> Generated:
    heads = Heads(((0, 1, 2),), (0, 1, 2))
    return Generated(heads, "seen", False, generator, available, alpha * count / 4, beta, count, steps, seed=11)


def one_head(rng) -> Network:
    network = Network(feature_start(4))
    network.grow([3], 0)
    network.double()
    with torch.no_grad():
        network.heads[0].weight.copy_(torch.from_numpy(rng.standard_normal((3, 4))))
        network.heads[0].bias.copy_(torch.from_numpy(rng.standard_normal(3)))
    return network


@pytest.mark.parametrize(("alpha", "beta"), [(3.0, 2.0), (0.0, 2.0), (3.0, 0.0)])
def test_the_clients_loss_and_gradient_are_those_of_the_equations(alpha, beta):
    rng = np.random.default_rng(6)
    network, generator = one_head(rng), made_generator(classes=3).eval()
    Z, labels = rng.standard_normal((4, 4)), np.array([0, 2, 1, 2])
    recorded = []
    draw = FeatureGenerator.draw

    def recording(self, classes, draws=None):
        noise = torch.randn((len(classes), self.inputs), generator=draws).double()
        recorded.append((classes.numpy(), noise.numpy()))
        return self(classes, noise), noise

    objective = objective_at(generator, torch.tensor([0, 2]), alpha, beta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureGenerator, "draw", recording)
        loss = objective.loss(network, torch.from_numpy(Z), torch.from_numpy(labels))
    assert FeatureGenerator.draw is draw
    loss.backward()
    none = (np.array([0]), np.zeros((1, 3)))
    (own, own_noise), (drawn, noise) = (recorded[0] if beta else none), (recorded[-1] if alpha else none)
    G = plain(generator)
    W, b = (parameter.detach().numpy() for parameter in network.heads[0].parameters())
    assert set(drawn.tolist()) <= {0, 2}
    of_labels = oracle.generate(G, own, own_noise, False) if beta else Z
    made = oracle.generate(G, drawn, noise, False)
    if beta:
        assert own.tolist() == labels.tolist()
    if alpha:
        assert len(drawn) == 6
    given = (W, b, Z, labels, of_labels, made, drawn, alpha, beta, 6 / 4)
    assert loss.item() == pytest.approx(oracle.client_loss(*given), abs=1e-6)
    for found, expected in zip(network.heads[0].parameters(), oracle.client_gradient(*given), strict=True):
        np.testing.assert_allclose(found.grad.numpy(), expected, atol=1e-6)


def test_after_the_first_epochs_a_client_minimises_its_own_loss_alone():
    rng = np.random.default_rng(7)
    network, generator = one_head(rng), made_generator(classes=3).eval()
    Z, labels = torch.from_numpy(rng.standard_normal((4, 4))), torch.tensor([0, 2, 1, 2])
    objective = objective_at(generator, torch.tensor([0, 1, 2]), steps=2)
    own = torch.nn.functional.cross_entropy(network(Z), labels).item()
    found = [objective.loss(network, Z, labels).item() for _ in range(4)]
    assert found[0] != own != found[1]
    assert found[2:] == [own, own]


def test_the_generated_epochs_are_counted_in_steps_of_the_clients_own_batches():
    """9 samples in batches of 4 are two steps, since batch norm takes no single sample."""
    method, problem = fedgen("features", generated_epochs=1), dataclasses.replace(tiny_problem(), inputs=6)
    tasks = feature_tasks(0, [2], [[9, 12]])
    server, client = method.server(problem), method.client(problem)
    [task] = images_stream(tasks)
    server.start_task(task)
    steps = []
    for round_ in range(3):
        broadcast = server.broadcast(task, round_)
        for k, parts in enumerate(tasks[0]):
            shard = image_shard(k, 0, *parts)
            server.absorb(k, turn(client, shard, broadcast))
            if round_ == 2:
                steps.append(client.objective(shard, broadcast, {})._steps)
        server.finish_round()
    assert steps == [2, 3]


def test_both_weights_decay_by_round_and_end_at_a_least_one():
    method = FedGen(alpha=10.0, beta=2.0)
    assert method.decayed(10.0, 0) == 10
    assert method.decayed(2.0, 3) == pytest.approx(2 * 0.98**3)
    assert method.decayed(2.0, 5000) == 1e-4
    assert method.decayed(0.0, 5) == 0


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["images", "features"])
def test_without_both_terms_it_is_finetune_bit_for_bit_and_nothing_is_generated(on):
    method = fedgen(on, alpha=0.0, beta=0.0)
    federation, other = learnt(method, on), learnt(FineTune(training(), on=on), on)
    assert same(model_of(federation), model_of(other))
    assert federation.server.generator.classes.shape[0] == 0
    assert federation.server.state_dict().keys() == other.server.state_dict().keys()
    bytes_of = [[(r.stage, r.up_bytes, r.down_bytes) for r in f.state.ledger.uploads] for f in (federation, other)]
    assert bytes_of[0] == bytes_of[1]
    for alpha, beta in ((1.0, 0.0), (0.0, 1.0)) if on == "features" else ((1.0, 1.0),):
        assert not same(model_of(learnt(fedgen(on, alpha=alpha, beta=beta), on)), model_of(other))


def test_messages_have_the_bytes_of_the_formulas():
    on, d, h, N = "features", 6, 8, 3
    federation = learnt(fedgen(on, {"hidden": h, "noise": N}), on)
    plain_one = learnt(FineTune(training(), on=on), on)
    finetune = {(r.task, r.round, r.client): r for r in plain_one.state.ledger.uploads}
    first = {(r.task, r.client): True for r in federation.state.ledger.uploads if False}
    for row in federation.state.ledger.uploads:
        if not row.up_bytes:
            continue
        C, classes = 2 * (row.task + 1), 2
        if row.stage == COUNTS:
            assert row.up_bytes == 4 * classes
            assert row.down_bytes == 4 * (row.task + 1)  # the sizes of the heads
            continue
        assert row.stage == MODEL
        beside = finetune[row.task, row.round - 1, row.client]
        assert row.up_bytes == beside.up_bytes
        # Client 1 has a single sample of task 1, but every class is somebody's.
        labels = 0 if (row.task, row.client) in first else 4 * classes
        generator = 4 * (h * (C + N + 1) + 4 * h + d * (h + 1))
        if row.round == 1:
            assert row.down_bytes == beside.down_bytes
        else:
            assert row.down_bytes == beside.down_bytes + generator + labels
            first[row.task, row.client] = True
    assert federation.server.report()["generator_bytes"] == generator


def test_the_server_keeps_heads_of_one_round_only_and_of_them_nothing_else():
    tasks, problem = tasks_and_problem("images")
    method = fedgen()
    server, client = method.server(problem), method.client(problem)
    [task] = images_stream(tasks[:1])
    server.start_task(task)
    for round_ in range(3):
        broadcast = server.broadcast(task, round_)
        for k in (0, 1):
            server.absorb(k, turn(client, image_shard(k, 0, *tasks[0][k]), broadcast))
        kept = [sum(value.nbytes for value in heads.values()) for heads in server._heads.values()]
        assert kept == ([] if round_ == 0 else [4 * 2 * (problem.inputs + 1)] * 2)
        server.finish_round()
        assert server._heads == {}


@pytest.mark.parametrize("on", ["images", "features"])
def test_a_run_that_is_resumed_after_any_round_is_the_same_bit_for_bit(on):
    tasks, problem = tasks_and_problem(on)
    method = fedgen(on, knobs={"fraction": 0.7})
    saved = []

    def save(done):
        state, tensors = done.save()
        saved.append(({**state}, {name: value.clone() for name, value in tensors.items()}))

    whole = federation_of(method, problem, tasks)
    whole.run(save, every=1)
    for state, tensors in saved[:-1:3]:
        resumed = federation_of(method, problem, tasks)
        resumed.restore({**state}, tensors)
        resumed.run(lambda _: None)
        assert same(resumed.server.state_dict(), whole.server.state_dict())
        assert resumed.server.taught == 2
    assert any(name.startswith("generator_adam.") for name in whole.server.state_dict())


def test_a_generator_that_no_class_qualifies_for_is_neither_taught_nor_sent():
    """One sample of each class for each client: nobody has two."""
    rng = np.random.default_rng(0)
    Z = torch.from_numpy(rng.standard_normal((4, 6)))
    tasks = [[(Z[:2], torch.tensor([0, 1])), (Z[2:], torch.tensor([0, 1]))]]
    problem = dataclasses.replace(tiny_problem(), inputs=6, network=None)
    federation = federation_of(fedgen("features"), problem, tasks)
    federation.run(lambda _: None)
    other = federation_of(FineTune(training(), on="features"), problem, tasks)
    other.run(lambda _: None)
    assert federation.server.taught == -1
    assert same(model_of(federation), model_of(other))


def test_classes_of_one_logit_in_an_old_head_are_generated_too():
    """Class 1 comes back in task 1: its logit is in the first head, its column in the second task."""
    rng = np.random.default_rng(1)
    Z = torch.from_numpy(rng.standard_normal((24, 6)))
    tasks = [[(Z[:12], torch.arange(12) % 2)], [(Z[12:], 1 + torch.arange(12) % 2)]]
    problem = dataclasses.replace(tiny_problem(), inputs=6, network=None, device=CPU)
    for over in ("seen", "task"):
        federation = federation_of(fedgen("features", loss_over=over), problem, tasks)
        federation.run(lambda _: None)
        assert federation.server.taught == 1
        assert federation.server.tasks == [(0, 1), (1, 2)]
        assert federation.server.counts[0].tolist() == [6, 6]
        assert all(bool(torch.isfinite(value).all()) for value in model_of(federation).values())
