"""STSA and STSA-E against the oracles, and the properties that the paper promises."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE, STSAEServer
from fcl_bench.randomness import generator
from tests.methods import stsa_oracle as oracle
from tests.methods.harness import (
    context_of,
    dealt,
    draw_tasks,
    learn,
    projection_of,
    random_tasks,
    relative_error,
    shard_of,
    stream_of,
    turn,
)


@pytest.mark.parametrize("M", [None, 20, 150])
@pytest.mark.parametrize("seed", range(6))
def test_stsa_agrees_with_the_oracle(seed, M):
    tasks = random_tasks(seed, 12)
    gamma = float(10.0 ** (seed - 2))
    server, classifiers = learn(STSA(M=M, gamma=gamma), context_of(8, seed), tasks)
    for ours, theirs in zip(classifiers, oracle.stsa(tasks, projection_of(server), gamma), strict=True):
        assert relative_error(ours, theirs) < 1e-9


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 200),
    beta=st.sampled_from([0.05, 0.5, 100]),
    M=st.sampled_from([None, 12, 90]),
)
def test_stsa_is_the_centralised_solution_for_any_partition_and_order(seed, clients, beta, M):
    rng = np.random.default_rng(seed)
    tasks = draw_tasks(rng, 5, [3, 2], [[60], [50]])
    server, classifiers = learn(STSA(M=M, gamma=2.0), context_of(5), dealt(rng, tasks, clients, beta))
    for ours, theirs in zip(classifiers, oracle.centralised(tasks, projection_of(server), 2.0), strict=True):
        assert relative_error(ours, theirs) < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_stsa_without_random_features_is_afcl_with_the_same_ridge(seed):
    tasks = random_tasks(seed, 12)
    _, stsa = learn(STSA(M=None, gamma=3.0), context_of(8), tasks)
    _, afcl = learn(AFCL(gamma=0.7, ridge=3.0), context_of(8), tasks)
    for ours, theirs in zip(stsa, afcl, strict=True):
        assert relative_error(ours, theirs.numpy()) < 1e-9


@pytest.mark.parametrize("merge", ["sequential", "joint", "tree"])
def test_fedran_at_the_rank_of_the_data_is_stsa_and_joint(merge):
    tasks = random_tasks(3, 12)
    _, fedran = learn(FedRAN(M=30, rank=30, ridge=5.0, merge=merge), context_of(8), tasks)
    _, floored = learn(FedRAN(M=30, rank=30, ridge=5.0, merge=merge, complement="floor"), context_of(8), tasks)
    _, stsa = learn(STSA(M=30, gamma=5.0), context_of(8), tasks)
    _, joint = learn(CentralisedRidge(M=30, ridge=5.0), context_of(8), tasks)
    for drop, floor, exact, central in zip(fedran, floored, stsa, joint, strict=True):
        assert relative_error(drop, exact.numpy()) < 1e-9
        assert relative_error(floor, exact.numpy()) < 1e-9
        assert relative_error(central, exact.numpy()) < 1e-10


def groups_of(tasks, P, dummy_clients: int, seed: int):
    """The groups that the clients form, from the documented draw: (C (M, c), n (c,)) for each, empty ones included."""
    made = []
    for task, clients in zip(stream_of(tasks), tasks, strict=True):
        groups = []
        for k, (Z, labels) in enumerate(clients):
            if len(labels):
                H = Z if P is None else np.maximum(Z @ P, 0)
                group = generator(seed, "dummy clients", task.index, k).permutation(len(H)) % dummy_clients
                one_hot = labels[:, None] == np.array(task.new_columns)
                groups += [
                    (H[group == j].T @ one_hot[group == j], one_hot[group == j].sum(0)) for j in range(dummy_clients)
                ]
        made.append(groups)
    return made


@pytest.mark.parametrize("estimator", ["paper", "unbiased"])
@pytest.mark.parametrize("dummy_clients", [1, 3, 30])
@pytest.mark.parametrize("seed", range(5))
def test_stsa_e_agrees_with_the_oracle(seed, dummy_clients, estimator):
    """Few groups and many (the columns are then more than M and kept as products); lone groups, empty groups."""
    tasks = random_tasks(seed, 12)
    method = STSAE(M=40, gamma=50.0, dummy_clients=dummy_clients, estimator=estimator)
    server, classifiers = learn(method, context_of(8, seed), tasks)
    groups = groups_of(tasks, projection_of(server), dummy_clients, seed)
    for ours, theirs in zip(classifiers, oracle.stsa_e(groups, 50.0, estimator), strict=True):
        assert relative_error(ours, theirs) < 1e-9


def test_unbiased_stsa_e_is_stsa_when_no_group_holds_two_samples_of_a_class():
    rng = np.random.default_rng(0)
    tasks = draw_tasks(rng, 8, [3, 3], [[9, 14, 1], [20, 6, 11]])
    _, stsa = learn(STSA(M=30, gamma=5.0), context_of(8), tasks)
    # As many groups as the largest client has samples: each group holds one sample at most.
    _, estimated = learn(STSAE(M=30, gamma=5.0, dummy_clients=20, estimator="unbiased"), context_of(8), tasks)
    for ours, theirs in zip(estimated, stsa, strict=True):
        assert relative_error(ours, theirs.numpy()) < 1e-9


def test_dummy_clients_depend_on_the_clients_own_draw_alone():
    tasks = draw_tasks(np.random.default_rng(0), 8, [3], [[20, 20]])
    method, context = STSAE(M=16, dummy_clients=4), context_of(8)
    [task] = stream_of(tasks)
    broadcast = method.server(context).broadcast(task, 0)
    both = method.client(context)
    shards = [shard_of(k, 0, *tasks[0][k]) for k in (0, 1)]
    turn(both, shards[0], broadcast)
    after, alone = turn(both, shards[1], broadcast), turn(method.client(context), shards[1], broadcast)
    assert all(torch.equal(tensor, alone[name]) for name, tensor in after.items())
    assert after["n"].sum(dim=1).tolist() == [5, 5, 5, 5]


def mean_errors(beta: float, draws: int) -> dict[str, float]:
    """Relative error of the mean of many estimates, for fixed groups and fresh Gaussian samples; and its noise.

    Groups of one class only, so that all of the label skew is in the groups' sizes, many of them zero.
    """
    M, groups = 6, 25
    rng = np.random.default_rng(1)
    scale = np.linalg.qr(rng.standard_normal((M, M)))[0] * np.linspace(0.5, 2, M)
    mean = rng.standard_normal(M)
    counts = rng.multinomial(60, rng.dirichlet(np.full(groups, beta)))
    owner = np.repeat(np.arange(groups), counts)
    totals = {"paper": np.zeros((M, M)), "unbiased": np.zeros((M, M)), "exact": np.zeros((M, M))}
    from fcl_bench.methods.closed_form.stsa_e import ClassScatter

    for _ in range(draws):
        X = mean + rng.standard_normal((len(owner), M)) @ scale.T
        sums = np.zeros((groups, M))
        np.add.at(sums, owner, X)
        totals["exact"] += X.T @ X
        for name in ("paper", "unbiased"):
            scatter = ClassScatter(torch.zeros(1, M, dtype=torch.float64))
            scatter.add(torch.from_numpy(sums[:, None, :].copy()), torch.from_numpy(counts[:, None]))
            G = torch.zeros(M, M, dtype=torch.float64)
            scatter.add_to(G, unbiased=name == "unbiased")
            totals[name] += G.numpy()
    exact = totals["exact"]
    return {name: np.linalg.norm(totals[name] - exact) / np.linalg.norm(exact) for name in ("paper", "unbiased")}


@pytest.mark.slow
def test_the_printed_estimator_is_biased_under_label_skew_and_the_unbiased_one_is_not():
    """Erratum 1: the unbiased one's mean error falls with the number of draws, the printed one's stays."""
    few, many = mean_errors(beta=0.1, draws=100), mean_errors(beta=0.1, draws=6400)
    assert many["unbiased"] < few["unbiased"] / 3  # Monte-Carlo noise: 8 times less in expectation
    assert many["unbiased"] < 0.01
    assert many["paper"] > 0.1
    assert abs(many["paper"] - few["paper"]) < 0.05
    assert mean_errors(beta=100, draws=1600)["paper"] < 0.05


def test_a_class_in_one_group_keeps_its_mean_and_is_told_once(caplog):
    tasks = draw_tasks(np.random.default_rng(0), 8, [2, 2], [[10], [10]])
    with caplog.at_level(logging.INFO):
        server, [W, _] = learn(STSAE(M=None, gamma=1.0, dummy_clients=1, estimator="unbiased"), context_of(8), tasks)
    assert sum("in one group only" in record.message for record in caplog.records) == 1
    [(Z, labels)] = tasks[0]
    sums = Z.T @ np.eye(2)[labels]
    G = sums / np.bincount(labels) @ sums.T
    assert relative_error(W, np.linalg.solve(G + np.eye(8), sums)) < 1e-9
    assert isinstance(server, STSAEServer)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), estimator=st.sampled_from(["paper", "unbiased"]), dummy_clients=st.integers(1, 30))
def test_the_estimate_is_positive_semidefinite(seed, estimator, dummy_clients):
    """By Cauchy-Schwarz sum_j C_j C_j'/n_j >= S S'/n, whatever the sums are (docs/errata/stsa.md, 2)."""
    tasks = random_tasks(seed, 12)
    method = STSAE(M=25, dummy_clients=dummy_clients, estimator=estimator)
    server, _ = learn(method, context_of(8), tasks)
    assert isinstance(server, STSAEServer)
    coarse, _ = learn(method, context_of(8, wire="bfloat16"), tasks)
    for made in (server, coarse):
        values = np.linalg.eigvalsh(made.estimate.matrix.numpy())
        assert values[0] >= -1e-12 * values[-1]


def test_a_gram_matrix_that_the_wire_made_indefinite_is_told_and_its_noise_left_out(caplog):
    tasks = draw_tasks(np.random.default_rng(3), 30, [4], [[20, 20]], offset=5)
    with caplog.at_level(logging.WARNING):
        server, [W] = learn(STSA(M=None, gamma=1e-3), context_of(30, wire="bfloat16"), tasks)
    G = np.tril(server.estimate.matrix.numpy()) + np.tril(server.estimate.matrix.numpy(), -1).T + 1e-3 * np.eye(30)
    smallest = np.linalg.eigvalsh(G)[0]
    assert smallest < 0
    [told] = [record.message for record in caplog.records]
    assert f"smallest eigenvalue {smallest:.3g}" in told
    assert "condition number" in told
    # Most samples are right all the same, which an indefinite solve would not give.
    Z, labels = (np.concatenate(parts) for parts in zip(*tasks[0], strict=True))
    assert ((Z @ W.numpy()).argmax(axis=1) == labels).mean() > 0.8


def test_one_client_of_many_groups_counts_itself_only():
    """A client without samples takes no part, so its groups are not among the K of the printed form."""
    tasks = draw_tasks(np.random.default_rng(5), 8, [3], [[30, 0]])
    alone = [[tasks[0][0]]]
    method = STSAE(M=20, gamma=1.0)
    assert torch.equal(learn(method, context_of(8), tasks)[1][0], learn(method, context_of(8), alone)[1][0])
