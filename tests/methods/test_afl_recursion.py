"""AFL's recursion (Eq. 9-11 as printed, with the right sign) beside its running sum: equal on regular clients only."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.afl import AFL, PairwiseLaw, inverse
from tests.methods import afl_oracle, stsa_oracle
from tests.methods.harness import (
    CPU,
    context_of,
    draw_tasks,
    learn,
    random_tasks,
    relative_error,
)
from tests.small_runs import run_in

#: Table 3 at gamma 0 in miniature: without and with a sample for each of 20 features.
FEATURES, CLIENTS = 20, 40


def recursive(**knobs: float | bool | str) -> AFL:
    return AFL(aggregation="recursive", **knobs)


@pytest.mark.parametrize("ri", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_with_a_regulariser_the_recursion_is_the_papers_pairwise_form_and_the_sum(seed, ri):
    tasks, gamma = random_tasks(seed, 30), [1.0, 0.01, 100.0][seed % 3]
    _, classifiers = learn(recursive(gamma=gamma, ri=ri), context_of(8), tasks)
    _, sums = learn(AFL(gamma=gamma, ri=ri), context_of(8), tasks)
    for ours, theirs, sum_ in zip(classifiers, afl_oracle.afl_pairwise(tasks, gamma, ri), sums, strict=True):
        assert relative_error(ours, theirs) < 1e-7
        assert relative_error(ours, sum_.numpy()) < 1e-7


def test_every_step_has_the_weights_of_eq_10_with_the_sign_that_holds():
    """Each matrix product as it stands there, no product rearranged; the printed sign gives something else."""
    rng = np.random.default_rng(0)
    tasks = draw_tasks(rng, 6, [3], [[20, 30, 25, 40]])
    [[*clients]] = tasks
    eye, law = np.eye(6), PairwiseLaw(6, torch.float64, CPU)
    W, C, printed = None, np.zeros((6, 6)), None
    law.widen(3)
    for X, labels in clients:
        W_k, C_k = afl_oracle.local(X, afl_oracle.one_hot(labels, 3), 0.5)
        law.add(torch.from_numpy(C), torch.from_numpy(C_k), torch.from_numpy(W_k))
        if W is None:
            W = printed = W_k
        else:
            R, R_k, total = np.linalg.inv(C), np.linalg.inv(C_k), np.linalg.inv(C + C_k)
            W_old, first = W, printed
            W = (eye - R @ C_k @ (eye - total @ C_k)) @ W_old + (eye - R_k @ C @ (eye - total @ C)) @ W_k
            printed = (eye - R @ C_k @ (eye + total @ C_k)) @ first + (eye - R_k @ C @ (eye + total @ C)) @ W_k
        C = C + C_k
        np.testing.assert_allclose(law.W.numpy(), W, atol=1e-10)
    assert np.abs(printed - W).max() > 1
    assert (law.inverted, law.singular) == (2 * 4 - 1, 0)


def few_each(seed: int, samples: int):
    rng = np.random.default_rng(seed)
    return draw_tasks(rng, FEATURES, [4], [[samples] * CLIENTS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_regulariser_it_collapses_on_small_clients_and_the_sum_does_not(dtype, caplog):
    """Table 3, gamma 0: fewer samples than features at each client."""
    tasks, context = few_each(0, 5), dataclasses.replace(context_of(FEATURES), dtype=dtype)
    exact = stsa_oracle.centralised(tasks, None, 0.0)[0]
    _, [summed] = learn(AFL(gamma=0.0, ri=False), context, tasks)
    with caplog.at_level(logging.WARNING):
        server, [found] = learn(recursive(gamma=0.0, ri=False), context, tasks)
    assert relative_error(summed, exact) < (1e-3 if dtype == torch.float32 else 1e-9)
    assert relative_error(found, exact) > 10 or not found.any()
    told = [record.message for record in caplog.records if "the recursion" in record.message]
    assert len(told) == 1
    assert "method.aggregation=sum" in told[0]
    assert server.report()["trouble"] in told[0]


def test_with_more_samples_than_features_it_is_exact_without_a_regulariser_too():
    """K = 100 of Table 3; and then nothing is told."""
    tasks = few_each(0, 60)
    server, [found] = learn(recursive(gamma=0.0, ri=False), context_of(FEATURES), tasks)
    assert relative_error(found, stsa_oracle.centralised(tasks, None, 0.0)[0]) < 1e-9
    assert server.report()["trouble"] is None


def test_an_overflow_leaves_zeros_and_no_nan():
    tasks = few_each(1, 5)
    server, [found] = learn(recursive(gamma=0.0, ri=False), context_of(FEATURES), tasks)
    assert found.any()
    server.law.W[0, 0] = float("inf")
    server.finish_task()
    assert not server.model()["W"].any()
    assert "overflowed: 40 clients" in server.report()["trouble"]
    assert np.isfinite(server.report()["condition"])


@pytest.mark.slow
def test_dead_features_have_a_moore_penrose_inverse():
    """An exact zero on the diagonal ends the elimination; what is left is as if the feature were not there."""
    tasks = few_each(2, 60)
    for Z, _ in tasks[0]:
        Z[:, :3] = 0
    _, [found] = learn(recursive(gamma=0.0, ri=False), context_of(FEATURES), tasks)
    assert relative_error(found, afl_oracle.moore_penrose(tasks)[0]) < 1e-6
    R, condition = inverse(torch.diag(torch.tensor([2.0, 0.0])))
    torch.testing.assert_close(R, torch.diag(torch.tensor([0.5, 0.0])))
    assert condition == 1 / torch.finfo(torch.float32).eps


def test_a_ridge_is_added_after_the_recursion():
    tasks = random_tasks(3, 30)
    _, ours = learn(recursive(ridge=2.0), context_of(8), tasks)
    for found, exact in zip(ours, stsa_oracle.centralised(tasks, None, 2.0), strict=True):
        assert relative_error(found, exact) < 1e-7


@pytest.mark.slow
def test_the_sum_keeps_its_id_and_an_unknown_aggregation_is_refused(tmp_path):
    words = ("method=afl", "data=digits", "tasks=1", "clients=4")
    plain = run_in(tmp_path, *words)
    assert run_in(tmp_path, *words, "method.aggregation=sum").record["run_id"] == plain.record["run_id"]
    other = run_in(tmp_path, *words, "method.aggregation=recursive")
    assert other.record["run_id"] != plain.record["run_id"]
    assert other.record["metrics"]["A_T"] == pytest.approx(plain.record["metrics"]["A_T"], abs=0.01)
    with pytest.raises(UserError, match="method.aggregation=pairs is not known"):
        run_in(tmp_path, *words, "method.aggregation=pairs")


@pytest.mark.slow
def test_on_digits_fifty_clients_are_enough_to_see_the_collapse(tmp_path):
    """docs/methods/afl.md: the command there."""
    words = ("method=afl", "data=digits", "tasks=1", "method.gamma=0", "method.ri=false", "clients=50")
    accuracies = [
        run_in(tmp_path, *words, f"method.aggregation={name}").record["metrics"]["A_T"] for name in ("sum", "recursive")
    ]
    assert accuracies[0] > 90
    assert accuracies[1] < 30
