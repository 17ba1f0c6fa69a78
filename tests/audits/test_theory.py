"""rho and beta of FedProTIP's bounds against autograd and dense projectors, at the models that rounds start from."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fcl_bench.engine.codec import decoded
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.methods.projection.projected import ProjectedMethod
from fcl_bench.methods.projection.subspace import ProjectionAudit
from fcl_bench.protocol.audit import Audit, FullData
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.method import Server
from fcl_bench.training.network import Network
from tests.methods import fedprotip_oracle as oracle
from tests.methods.fedprotip_harness import HEADS, SMALL, copy_of, layer_of, three_tasks, training
from tests.methods.harness import on_wire, turn
from tests.methods.training_harness import (
    CPU,
    ImageTasks,
    image_shard,
    image_tasks,
    images_stream,
    learn_images,
    tiny_context,
)
from tests.small_runs import interrupted_in, run_in

#: Where a round of training started: task, round, the model, the bases then.
Start = tuple[int, int, dict[str, torch.Tensor], dict[str, np.ndarray]]


def bases_of(server: Server) -> dict[str, np.ndarray]:
    known = {layer: server.known(layer).numpy() for layer in server.widths()}
    return {layer: Phi for layer, Phi in known.items() if Phi.shape[1]}


def audited(
    method: ProjectedMethod, context: Context, tasks: ImageTasks, reload: bool = False
) -> tuple[list[dict[str, float | None]], list[Start]]:
    """A stream with an audit, as the engine runs it: its rows, and where every round of training started.

    `reload` has a new audit take over the state of the last one after every round.
    """
    audit: Audit = method.audits(context)["bounds"]
    server, client, starts = method.server(context), method.client(context), []
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        server.start_task(task)
        for round_, stage in enumerate(method.stages(task)):
            broadcast = server.broadcast(task, round_)
            if stage == "model":
                starts.append((task.index, round_, copy_of(server.network.state_dict()), bases_of(server)))
            for k, (images, labels) in enumerate(clients):
                if len(labels):
                    client_data = image_shard(k, task.index, images, labels)
                    message = on_wire(turn(client, client_data, broadcast), method, context)
                    server.absorb(k, decoded(message, context.dtype, CPU))
                    if round_ == 0:
                        audit.observe(task, client_data)
            server.finish_round()
            audit.look(task, round_, server)
            if reload:
                rows, state, audit = audit.rows, copy_of(audit.state_dict()), method.audits(context)["bounds"]
                audit.rows = rows
                audit.load_state_dict(state)
        server.finish_task()
        audit.report(task, server, FullData(list, lambda indices: None))
    return audit.rows, starts


def fraction(method: ProjectedMethod, context: Context, tasks: ImageTasks, start: Start, tau: int) -> float | None:
    """||P g_tau|| / ||g_tau||: plain autograd in float64, projectors built whole."""
    task, _, state, bases = start
    sizes = [int(max(labels.max() for _, labels in clients if len(labels))) for clients in tasks[: task + 1]]
    sizes = np.diff([-1, *sizes]).tolist()
    network = Network(context.network)
    network.grow(sizes, 0)
    network.load_state_dict(state)
    network.double().eval()
    samples = [(images[: method.theory], labels[: method.theory]) for images, labels in tasks[tau]]
    images, labels = (torch.cat(parts) for parts in zip(*samples, strict=True))
    mean, std = (
        torch.tensor(value, dtype=torch.float64).view(3, 1, 1) for value in (context.network.mean, context.network.std)
    )
    scores = network((images.double() / 255 - mean) / std)
    if method.loss_classes == "task":
        first = sum(sizes[:tau])
        scores, labels = scores[:, first : first + sizes[tau]], labels - first
    loss = nn.functional.cross_entropy(scores, labels)
    heads = [task] if method.frozen_heads else range(task + 1)
    names = [f"body.stage{stage}.0.weight" for stage in range(method.frozen_stages + 1, 5)]
    names += [f"heads.{head}.weight" for head in heads] if method.projected_heads else []
    own = dict(network.named_parameters())
    gradients = torch.autograd.grad(loss, [own[name] for name in names], allow_unused=True)
    flat, projected = [], []
    for name, gradient in zip(names, gradients, strict=True):
        gradient = torch.zeros_like(own[name]) if gradient is None else gradient
        flat.append(gradient.flatten(1).numpy())
        projected.append(bases.get(layer_of(name), np.zeros((flat[-1].shape[1], 0))))
    return oracle.surviving_fraction(flat, projected)


VARIANTS = {
    "fedprotip": FedProTIP(training=training(batch_size=4, epochs=1), frozen_stages=1, threshold=0.5, theory=5),
    "task's classes only": FedProTIP(
        training=training(epochs=1), frozen_stages=2, threshold=0.5, theory=3, loss_classes="task"
    ),
    "all heads": FedProTIP(
        training=training(epochs=1),
        frozen_stages=0,
        threshold=0.3,
        theory=100,
        frozen_heads=False,
        projected_heads=True,
    ),
    "fot": FOT(training=training(epochs=1), frozen_stages=1, threshold=0.8, theory=4),
}


@functools.cache
def variant(name: str) -> tuple[list[dict[str, float | None]], list[Start]]:
    return audited(VARIANTS[name], tiny_context(), three_tasks())


@pytest.mark.slow_cases("all heads", "fedprotip", "fot")
@pytest.mark.parametrize("name", VARIANTS)
def test_rho_and_beta_are_those_of_plain_gradients(name):
    method, context, tasks = VARIANTS[name], tiny_context(), three_tasks()
    found, starts = variant(name)
    assert len(found) == 3
    for task, row in enumerate(found):
        own = [start for start in starts if start[0] == task]
        assert len(own) == 2
        rhos = [fraction(method, context, tasks, start, task) ** 2 for start in own]
        betas = {tau: [fraction(method, context, tasks, start, tau) for start in own] for tau in range(task)}
        assert row["rho"] == pytest.approx(np.mean(rhos), rel=1e-3)
        assert row["rho_min"] == pytest.approx(oracle.rho(*unpacked(rhos)), rel=1e-3)
        every = [value for values in betas.values() for value in values]
        if task == 0:
            assert row == {"rho": 1.0, "rho_min": 1.0, "beta": None, "beta_max": None}
            continue
        assert row.keys() == {"rho", "rho_min", "beta", "beta_max", *(f"beta_{tau}" for tau in range(task))}
        assert row["beta"] == pytest.approx(np.mean(every), rel=1e-3)
        assert row["beta_max"] == pytest.approx(max(every), rel=1e-3)
        for tau, values in betas.items():
            assert row[f"beta_{tau}"] == pytest.approx(np.mean(values), rel=1e-3)
        assert all(0 <= value <= 1 for value in row.values())
        assert 0 < row["rho_min"] <= row["rho"] < 1
        assert 0 < row["beta"] <= row["beta_max"] < 1


def unpacked(rhos: list[float]) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    """Gradients and a basis for the oracle that give these values: so much outside the one, the rest inside."""
    gradients = [[np.array([[rho**0.5, (1 - rho) ** 0.5]])] for rho in rhos]
    return gradients, [np.array([[0.0], [1.0]])]


@pytest.mark.slow
def test_a_larger_threshold_leaves_less_of_every_gradient():
    """Fig. 2c: both rho and beta go down with epsilon."""
    rows = []
    for threshold in (0.1, 0.4, 0.7):
        method = FedProTIP(
            training=training(rounds=1, epochs=1), frozen_stages=1, threshold=threshold, threshold_step=0.0, theory=8
        )
        rows.append(audited(method, tiny_context(), three_tasks()[:2])[0][1])
    for key in ("rho", "beta"):
        assert rows[0][key] > rows[1][key] > rows[2][key] > 0


def test_the_reference_samples_are_the_first_of_each_client():
    """And a client's few are all there are; those of absent clients do not exist."""
    method = VARIANTS["fedprotip"]
    tasks = three_tasks()
    audit = method.audits(tiny_context())["bounds"]
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        for k, (images, labels) in enumerate(clients):
            if len(labels):
                audit.observe(task, image_shard(k, task.index, images, labels))
    state = audit.state_dict()
    for t, clients in enumerate(tasks):
        assert torch.equal(state[f"images.{t}"], torch.cat([images[:5] for images, _ in clients]))
        assert torch.equal(state[f"labels.{t}"], torch.cat([labels[:5] for _, labels in clients]))
    assert len(state["labels.2"]) == 5 + 5 + 1


@pytest.mark.slow
def test_an_audit_that_takes_over_from_another_after_every_round_finds_the_same():
    again, _ = audited(VARIANTS["fedprotip"], tiny_context(), three_tasks(), reload=True)
    assert again == variant("fedprotip")[0]


def test_looking_does_not_disturb_the_method():
    unwatched = dataclasses.replace(VARIANTS["fedprotip"], theory=0)
    plain = learn_images(unwatched, tiny_context(), three_tasks()[:2])
    first = next(state for task, round_, state, _ in variant("fedprotip")[1] if (task, round_) == (2, 0))
    assert all(torch.equal(first[name], value) for name, value in plain.network.state_dict().items())


def test_no_samples_no_audit():
    assert FedProTIP().audits(tiny_context()) == {}
    assert isinstance(FedProTIP(theory=1).audits(tiny_context())["bounds"], ProjectionAudit)


def test_a_gradient_of_zero_has_no_fraction():
    """A class of its own is always right: cross-entropy over a single class has no gradient."""
    method = FedProTIP(training=training(rounds=1, epochs=1), frozen_stages=1, theory=4, loss_classes="task")
    tasks = image_tasks(np.random.default_rng(0), [1, 1], [[8], [8]])
    found, _ = audited(method, tiny_context(), tasks)
    assert found == [
        {"rho": None, "rho_min": None, "beta": None, "beta_max": None},
        {"rho": None, "rho_min": None, "beta": None, "beta_max": None, "beta_0": None},
    ]


@pytest.mark.slow
def test_a_run_has_a_row_a_task_and_a_resumed_one_the_same_file(tmp_path, monkeypatch):
    """Of FOT; FedProTIP's is in test_fedprotip.py, interrupted in every stage."""
    choice = (
        *(knob for knob in SMALL if knob != "method=fedprotip"),
        "method=fot",
        "method.training.rounds=1",
        "method.theory=4",
    )
    whole = run_in(tmp_path / "whole", *choice)
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path / "parts", *choice)
    parts = run_in(tmp_path / "parts", *choice)
    assert (parts.folder / "bounds.csv").read_bytes() == (whole.folder / "bounds.csv").read_bytes()
    rows = pd.read_csv(whole.folder / "bounds.csv")
    assert list(rows) == ["rho", "rho_min", "beta", "beta_max", "beta_0", "beta_1"]
    assert rows.rho[0] == 1
    assert rows.beta.isna().tolist() == [True, False, False]
    assert rows.beta_1.isna().tolist() == [True, True, False]
    assert whole.record["bounds"] == parts.record["bounds"]
    assert len(whole.record["bounds"]) == 3


def test_heads_are_a_layer_of_the_gradient():
    """With every body direction protected, what is left is the new head's part outside the heads' basis."""
    method, context, tasks = (
        dataclasses.replace(VARIANTS["fedprotip"], projected_heads=True),
        tiny_context(),
        three_tasks(),
    )
    start = next(start for start in variant("fedprotip")[1] if start[0] == 1)
    full = {layer: np.eye(len(basis)) if layer != HEADS else basis for layer, basis in start[3].items()}
    left = fraction(method, context, tasks, (*start[:3], full), 1)
    assert 0 < left < fraction(method, context, tasks, start, 1)
