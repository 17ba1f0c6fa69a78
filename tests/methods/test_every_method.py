"""What holds for every closed-form method: bounded memory, finite results, trouble that is told."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.air import AIR
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.ds_al import DSAL
from fcl_bench.methods.closed_form.fedklda import FedKLDA
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketch
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from tests.methods.harness import context_of, draw_tasks, learn, learn_task, shard_of, stream_of, turn

METHODS = {
    "fedran": FedRAN(M=30, rank=10),
    "fedran floor": FedRAN(M=30, rank=10, complement="floor"),
    "fedran without random features": FedRAN(M=None, rank=4),
    "fedncm": FedNCM(),
    "fedncm euclid": FedNCM(M=30, similarity="euclid"),
    "fedlda": FedLDA(),
    "fedlda with random features": FedLDA(M=30, shrinkage="oas"),
    "fedklda": FedKLDA(M=30),
    "fedklda of three maps": FedKLDA(M=20, ensemble=3),
    "stsa": STSA(M=30),
    "air": AIR(M=30),
    "air logits": AIR(M=30, correction="logits"),
    "stsa_e": STSAE(M=30, dummy_clients=3),
    "stsa_e unbiased": STSAE(M=30, dummy_clients=3, estimator="unbiased"),
    "afl": AFL(),
    "afl with random features": AFL(M=30),
    "afcl": AFCL(),
    "centred_sketch": CentredSketch(M=30, rank=4),
    "gaussian_sketch": GaussianSketch(M=30, rank=4, class_rank=4),
    "centralised_ridge": CentralisedRidge(M=30),
    "ranpac": RanPAC(M=30),
    "ranpac, a fold held out": RanPAC(M=30, ridge="held_out"),
    "ranpac, a fold of a task": RanPAC(M=30, ridge="held_out", scope="task"),
    "ds_al": DSAL(M=30),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def held(thing) -> int:
    """Bytes of the tensors that can be reached from `thing` through objects of this package."""
    reachable, seen, storages = [thing], set(), {}
    while reachable:
        thing = reachable.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, (list, tuple)):
            reachable += thing
        elif isinstance(thing, dict):
            reachable += thing.values()
        elif type(thing).__module__.startswith("fcl_bench"):
            reachable += vars(thing).values() if hasattr(thing, "__dict__") else []
    return sum(storages.values())


@every_method
def test_the_server_keeps_no_upload(method):
    """In the middle of a task, after all uploads, what the server holds does not depend on the number of clients."""

    def after(clients: int) -> int:
        tasks = draw_tasks(np.random.default_rng(3), 6, [3], [[12] * clients])
        context = context_of(6)
        client, server = method.client(context), method.server(context)
        [task] = stream_of(tasks)
        server.start_task(task)
        for round_ in range(server.rounds(task)):
            broadcast = server.broadcast(task, round_)
            for k, (Z, labels) in enumerate(tasks[0]):
                server.absorb(k, turn(client, shard_of(k, 0, Z, labels), broadcast))
        return held(server)

    # STSA-E keeps a task's columns until there are more than M for each class, so a remainder may differ.
    slack = 8 * 3 * 30 * 30 if isinstance(method, STSAE) else 0
    if isinstance(method, GaussianSketch):
        # Its factors, and the sums of the inputs and along the factors, are kept until the task ends.
        slack = 8 * (30 * 4 + 4 + 4 * 3 + 6 * 3 + 2 * 3) * (60 - 20)
    assert after(60) <= after(20) + slack


@every_method
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_dead_constant_and_huge_features_give_finite_scores(method, scale):
    tasks = draw_tasks(np.random.default_rng(0), 8, [2, 2], [[20, 3], [15, 1]])
    for clients in tasks:
        for Z, _ in clients:
            Z *= scale
            Z[:, 0], Z[:, 1], Z[:, 2] = 0, scale, Z[:, 3]
    for wire in ("float64", "float16", "bfloat16"):
        server, classifiers = learn(method, context_of(8, wire=wire), tasks)
        assert all(torch.isfinite(W).all() for W in classifiers)
        assert np.isfinite(server.report()["condition"])
        if wire == "float64" and scale == 1e6:
            Z = np.concatenate([Z for clients in tasks for Z, _ in clients])
            labels = np.concatenate([labels for clients in tasks for _, labels in clients])
            assert (server.predict(torch.from_numpy(Z)).argmax(dim=1).numpy() == labels).mean() > 0.7


@pytest.mark.parametrize(
    "method",
    [
        STSA(M=None, gamma=0.0),
        STSA(M=40, gamma=0.0),
        AFL(gamma=0.0),
        AFCL(gamma=0.0),
        CentralisedRidge(M=None, ridge=0.0),
    ],
)
def test_no_regulariser_on_singular_data_is_told_with_a_condition_number(method, caplog):
    tasks = draw_tasks(np.random.default_rng(0), 8, [2], [[20, 3]])
    for Z, _ in tasks[0]:
        Z[:, 2] = Z[:, 3]
    with caplog.at_level(logging.WARNING):
        _, [W] = learn(method, context_of(8), tasks)
    told = [record.message for record in caplog.records]
    assert told
    assert all("condition number" in message for message in told)
    assert torch.isfinite(W).all()


@pytest.mark.parametrize(
    "method", [STSA(M=200, gamma=1e-2), CentralisedRidge(M=200, ridge=1e-2), STSA(M=None, gamma=1e-9)]
)
def test_sums_in_float32_that_can_not_resolve_the_ridge_are_told(method, caplog):
    tasks = draw_tasks(np.random.default_rng(0), 20, [3], [[100, 80]], offset=30)
    context = context_of(20)
    coarse = type(context)(**{**vars(context), "dtype": torch.float32})
    for Z, _ in tasks[0]:
        Z[:, :8] = Z[:, 8:16]
    with caplog.at_level(logging.WARNING):
        [task] = stream_of(tasks)
        server, client = method.server(coarse), method.client(coarse)
        server.start_task(task)
        broadcast = server.broadcast(task, 0)
        for k, (Z, labels) in enumerate(tasks[0]):
            client_data = shard_of(k, 0, Z.astype(np.float32), labels)
            server.absorb(k, turn(client, client_data, broadcast))
        server.finish_task()
    [told] = [record.message for record in caplog.records]
    assert "condition number" in told
    assert torch.isfinite(server.model()["W"]).all()


@pytest.mark.slow
def test_float32_sums_at_m_8192_are_told(caplog):
    """A ridge that float64 resolves and float32 hardly does, 3e7 below the largest eigenvalue."""
    rng = np.random.default_rng(0)
    Z, labels = rng.standard_normal((200, 16)).astype(np.float32) + 1, np.arange(200) % 4
    told = {}
    for dtype in (torch.float64, torch.float32):
        context = type(context_of(16))(**{**vars(context_of(16)), "dtype": dtype})
        probe = STSA(M=8192).server(context)
        H = torch.from_numpy(Z).to(dtype) @ probe.model()["projection"]
        largest = float(torch.linalg.matrix_norm(H.relu(), 2)) ** 2
        data = [[(Z.astype(str(dtype).removeprefix("torch.")), labels)]]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            _, [W] = learn(STSA(M=8192, gamma=largest / 3e7), context, data)
        assert torch.isfinite(W).all()
        told[dtype] = caplog.text
    assert told[torch.float64] == ""
    assert "ill-conditioned: condition number" in told[torch.float32]


@every_method
def test_well_conditioned_data_bring_no_warning(method, caplog):
    tasks = draw_tasks(np.random.default_rng(1), 6, [2, 2], [[60, 50], [70, 40]])
    with caplog.at_level(logging.WARNING):
        learn(method, context_of(6, wire="float32"), tasks)
    assert [record.message for record in caplog.records] == []


@every_method
def test_columns_of_earlier_tasks_keep_their_class_sums(method):
    """A later task adds columns to B and nothing to the old ones."""
    tasks, context = draw_tasks(np.random.default_rng(2), 6, [3, 2], [[30, 20], [25, 10]]), context_of(6)
    first, second = stream_of(tasks)
    server = method.server(context)
    learn_task(method, context, server, first, tasks[0])
    before = server.state_dict()["B"].clone()
    learn_task(method, context, server, second, tasks[1])
    after = server.state_dict()["B"]
    assert after.shape == (before.shape[0], 5)
    assert torch.equal(after[:, :3], before)
