"""Classes that come back in later tasks: closed forms stay exact, and training touches what it should."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.feddyn import FedDyn
from fcl_bench.methods.averaging.scaffold import Scaffold
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.methods.gradient.client import head_seed
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.protocol.context import Context, TestBatch
from fcl_bench.training.knobs import Training
from tests.methods.harness import context_of, learn, projection_of, relative_error
from tests.methods.training_harness import (
    ImageTasks,
    image_tasks,
    images_stream,
    learn_image_task,
    learn_images,
    tiny_context,
)

#: Methods that are exact at these ranks, and the ridge of their solution.
EXACT = {
    "stsa": (STSA(M=20, gamma=3.0), 3.0),
    "stsa_e": (STSAE(M=20, gamma=3.0, dummy_clients=40, estimator="unbiased"), 3.0),
    "afl": (AFL(gamma=2.0), 0.0),
    "afcl": (AFCL(gamma=2.0), 2.0),
    "fedran": (FedRAN(M=20, rank=20, ridge=0.5), 0.5),
    "centred_sketch": (CentredSketch(M=20, rank=20, ridge=0.5), 0.5),
    "centralised_ridge": (CentralisedRidge(M=20, ridge=0.5), 0.5),
}


def blurred_tasks(rng: np.random.Generator, tasks: int = 4, clients: int = 3, classes: int = 6):
    """Samples dealt to tasks and clients whatever their class; classes renumbered by first appearance."""
    n = tasks * clients * 9
    labels = rng.integers(0, classes, n)
    # Tasks prefer some classes, so that most have old and new ones.
    order = np.argsort(labels + rng.normal(0, 1.5, n))
    labels = labels[order]
    numbers: dict[int, int] = {}
    for task in np.split(labels, tasks):
        for label in np.unique(task):
            numbers.setdefault(int(label), len(numbers))
    labels = np.array([numbers[int(label)] for label in labels])
    Z = rng.standard_normal((n, 8)) + rng.standard_normal((classes, 8))[labels] * 2
    parts = list(zip(np.split(Z, tasks * clients), np.split(labels, tasks * clients), strict=True))
    return [parts[t * clients : (t + 1) * clients] for t in range(tasks)], Z, labels


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_classifier_is_the_ridge_solution_on_all_samples(name, seed):
    """Spatio-temporal invariance: it does not matter in which task a class's samples came."""
    method, ridge = EXACT[name]
    tasks, Z, labels = blurred_tasks(np.random.default_rng(seed))
    server, classifiers = learn(method, context_of(8), tasks)
    P = projection_of(server)
    H = Z if P is None else np.maximum(Z @ P, 0)
    Y = np.eye(labels.max() + 1)[labels]
    expected = np.linalg.solve(H.T @ H + ridge * np.eye(H.shape[1]), H.T @ Y)
    assert relative_error(classifiers[-1], expected) < 1e-8


def test_afcl_knows_the_classes_of_earlier_tasks():
    """A class that comes back is announced as known, whoever holds it, and in the order of its first registration."""
    tasks, *_ = blurred_tasks(np.random.default_rng(3))
    server, _ = learn(AFCL(), context_of(8), tasks)
    first = []
    for clients in tasks:
        for _, labels in clients:
            first += [label for label in np.unique(labels) if label not in first]
    assert server.order.tolist() == first


def recurring_context() -> Context:
    return replace(tiny_context(), recurring=True)


def domain_tasks(rng: np.random.Generator, shared: int) -> ImageTasks:
    """Two tasks of 4 classes, of which the second shares the last `shared` with the first."""
    first, second = image_tasks(rng, [4, 4], [[24, 16], [20, 20]])
    return [first, [(images, labels - shared) for images, labels in second]]


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.05, "weight_decay": 1e-3, **knobs})


SHARED_HEAD = {
    "fedavg": FedAvg(training=training(momentum=0.9)),
    "fot": FOT(training=training(momentum=0.9), frozen_stages=1, columns=32),
    "fedprotip": FedProTIP(training=training(momentum=0.9), frozen_stages=1, columns=32, threshold=0.3, tip=None),
    # It decays weights that have no gradient.
    "fedavg, frozen heads, adamw": FedAvg(training=training(optimizer="adamw", lr=0.01), frozen_heads=True),
}


@pytest.mark.parametrize("name", SHARED_HEAD)
@pytest.mark.parametrize("shared", [1, 4])
def test_a_shared_head_trains_the_rows_of_classes_that_come_back_and_no_others(name, shared):
    heads = []
    server = learn_images(
        SHARED_HEAD[name],
        recurring_context(),
        domain_tasks(np.random.default_rng(0), shared),
        after=lambda _, server: heads.append([head.weight.detach().clone() for head in server.network.heads]),
    )
    assert [len(head) for head in heads[-1]] == [4, 4 - shared]
    moved = (heads[1][0] != heads[0][0]).any(dim=1).tolist()
    # Fine-tuning freezes no row; the others freeze those of classes that the task does not have.
    resting = name != "fedavg"
    assert moved == [not resting] * (4 - shared) + [True] * shared
    assert server.predict(torch.zeros(3, 3, 8, 8, dtype=torch.uint8)).shape == (3, 8 - shared)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_rows_that_rest_stay_bit_for_bit_over_a_wire_of_16_bits(wire):
    """Their columns' scales differ between clients, so that each round rounded them anew."""
    heads = []
    learn_images(
        SHARED_HEAD["fot"],
        replace(recurring_context(), wire=tiny_context(wire=wire).wire),
        domain_tasks(np.random.default_rng(0), 2),
        after=lambda _, server: heads.append(server.network.heads[0].weight.detach().clone()),
    )
    assert (heads[1] != heads[0]).any(dim=1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("knobs", [{"projected_decay": False}, {"norms": "decay"}], ids=str)
def test_rows_of_classes_that_do_not_come_back_have_no_weight_decay_however_it_is_applied(knobs):
    method, states = replace(SHARED_HEAD["fedprotip"], **knobs), []
    learn_images(
        method,
        recurring_context(),
        domain_tasks(np.random.default_rng(0), 2),
        after=lambda _, server: states.append({name: v.clone() for name, v in server.network.state_dict().items()}),
    )
    moved = [(states[1][f"heads.0.{kind}"] != states[0][f"heads.0.{kind}"]) for kind in ("weight", "bias")]
    assert moved[0].any(dim=1).tolist() == [False, False, True, True]
    assert moved[1].tolist() == [False, False, *[knobs.get("norms") == "decay"] * 2]


@pytest.mark.parametrize("knobs", [{"server_optimizer": "momentum"}, {"server_optimizer": "adam", "server_lr": 0.1}])
@pytest.mark.parametrize("kind", [FedAvg, partial(FedDyn, reset=False)], ids=["FedAvg", "FedDyn"])
def test_rows_of_classes_that_do_not_come_back_take_no_step_of_the_servers(kind, knobs):
    """What the server's optimiser knows of them waits, as it does for parameters that are frozen altogether."""
    states = []
    learn_images(
        kind(training=training(**knobs), frozen_heads=True),
        recurring_context(),
        domain_tasks(np.random.default_rng(0), 2),
        after=lambda _, server: states.append({name: v.clone() for name, v in server.state_dict().items()}),
    )
    head = [name for name in states[0] if "heads.0." in name and name in states[1]]
    assert {f'_optimiser.velocity."heads.0.{part}"' for part in ("weight", "bias")} < set(head)
    for name in head:
        moved = (states[1][name] != states[0][name]).reshape(4, -1).any(dim=1)
        assert moved.tolist() == [False, False, True, True], name


def test_rows_of_classes_that_do_not_come_back_keep_scaffolds_variates():
    """Of the clients and of the server, as parameters that are frozen altogether do."""
    method = Scaffold(training=training(weighting="uniform", fraction=0.5), frozen_heads=True)
    server, states, before = method.server(recurring_context()), {}, {}
    tasks = domain_tasks(np.random.default_rng(0), 2)
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        learn_image_task(method, recurring_context(), server, task, clients, states=states)
        now = {k: own["variate.0.heads.0.weight"] for k, own in states.items() if "variate.0.heads.0.weight" in own}
        now["server"] = server.sums["heads.0.weight"]
        if task.index == 0:
            before = {k: value.clone() for k, value in now.items()}
    assert all(value.any() for value in before.values())
    for k, value in before.items():
        assert (now[k] != value).any(dim=1).tolist()[:2] == [False, False]
    assert (now["server"] != before["server"]).any(dim=1).tolist() == [False, False, True, True]


def relative(update: torch.Tensor, Phi: torch.Tensor) -> float:
    """How much of an update (c, d) is inside the range of Phi (d, q)."""
    return float((update.double() @ Phi.double()).norm() / update.double().norm())


@pytest.mark.parametrize("norms", ["frozen", "train"])
@pytest.mark.parametrize("shared", [2, 4])
@pytest.mark.parametrize("name", ["fot", "fedprotip"])
def test_a_shared_heads_update_is_orthogonal_to_old_inputs_though_heads_train_freely(name, shared, norms):
    """Of the average and, with FedProTIP, of every client; the new head of the same task is not held back."""
    method, seen, states = replace(SHARED_HEAD[name], norms=norms), [], []
    assert not method.projected_heads
    server = learn_images(
        method,
        recurring_context(),
        domain_tasks(np.random.default_rng(0), shared),
        seen=lambda k, broadcast, message: seen.append((broadcast, message)),
        after=lambda _, server: states.append({name: v.clone() for name, v in server.network.state_dict().items()}),
    )
    Phi = server.bases["basis.0.heads"]
    assert 0 < Phi.shape[1] < len(Phi)
    weight = "heads.0.weight"
    assert relative(states[1][weight] - states[0][weight], Phi) <= 1e-5
    local = [
        relative(message[weight] - broadcast[weight], Phi)
        for broadcast, message in seen
        if message.stage == "model" and "basis.0.heads" in broadcast
    ]
    assert len(local) == 4
    assert max(local) <= 1e-5 if name == "fedprotip" else min(local) > 1e-2
    # A bias has no inputs to keep away from: it stays where biases of the body do.
    assert torch.equal(states[1]["heads.0.bias"], states[0]["heads.0.bias"]) == (norms == "frozen")
    if shared < 4:
        start = method.build_network(recurring_context())
        method.grow(start, server.heads.sizes, head_seed(recurring_context()))
        assert relative(states[1]["heads.1.weight"] - start.heads[1].weight.detach(), Phi) > 1e-2
        assert states[1]["heads.1.bias"].any()


def test_a_context_that_says_no_class_comes_back_is_found_out():
    with pytest.raises(ValueError, match="task 1 has classes of earlier tasks"):
        learn_images(SHARED_HEAD["fot"], tiny_context(), domain_tasks(np.random.default_rng(0), 4))


def test_fedprotip_keeps_a_full_head_per_task_and_never_touches_an_old_one():
    tasks, heads = domain_tasks(np.random.default_rng(1), 4), []
    method = FedProTIP(training=training(), frozen_stages=1, columns=32, threshold=0.3)
    server = learn_images(
        method,
        recurring_context(),
        tasks,
        after=lambda _, server: heads.append(
            [value.clone() for name, value in server.network.state_dict().items() if name.startswith("heads.0")]
        ),
    )
    assert server.columns == server.tasks == [(0, 1, 2, 3)] * 2
    assert all(torch.equal(*pair) for pair in zip(*heads, strict=True))
    images = torch.cat([images for clients in tasks for images, _ in clients])
    prediction = server.classify(TestBatch.of(images))
    assert prediction.scores.shape == (len(images), 4)
    assert [head.shape for head in prediction.heads] == [(len(images), 4)] * 2
    assert torch.equal(prediction.scores, torch.maximum(*prediction.heads))
    model = server.model()
    assert model["W"].shape == (server.network.dimension, 8)
    assert model["head_columns"].tolist() == [0, 1, 2, 3] * 2
