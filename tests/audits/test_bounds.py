"""FedRAN's theorems and corollaries, and the centred sketch's bound, beside the truth."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.methods.closed_form.bounds import inverse_gap
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.protocol.audit import FullData
from tests.methods import fedran_oracle as oracle
from tests.methods.harness import context_of, draw_tasks, learn, learn_task, projection_of, shard_of, stream_of


def audited(method, tasks, inputs=8):
    """The audit's rows, one after each task."""
    context = context_of(inputs)
    server, audit = method.server(context), method.audits(context)["bounds"]
    tests = np.random.default_rng(9).standard_normal((60, inputs))
    for task, clients in zip(stream_of(tasks), tasks, strict=True):
        learn_task(method, context, server, task, clients)
        for k, (Z, labels) in enumerate(clients):
            if len(labels):
                audit.observe(task, shard_of(k, task.index, Z, labels))
        audit.report(task, server, FullData(lambda: torch.from_numpy(tests).split(25), lambda indices: None))
    return audit.rows


METHODS = st.one_of(
    st.builds(
        FedRAN,
        M=st.just(20),
        rank=st.integers(1, 20),
        ridge=st.sampled_from([1e-2, 1.0, 1e4]),
        merge=st.sampled_from(["sequential", "joint"]),
        complement=st.sampled_from(["drop", "floor"]),
        budget_bytes=st.sampled_from([None, 8 * 20 * 6]),
        bounds=st.just(True),
    ),
    st.builds(
        CentredSketch,
        M=st.just(20),
        rank=st.integers(0, 20),
        ridge=st.sampled_from([1e-2, 1.0, 1e4]),
        bounds=st.just(True),
    ),
)


@settings(max_examples=20, deadline=None)
@given(method=METHODS, seed=st.integers(0, 10**6))
def test_the_truth_never_exceeds_its_bound(method, seed):
    rng = np.random.default_rng(seed)
    tasks = draw_tasks(rng, 8, [2, 3], [[25, 1, 12], [6, 0, 30]])
    for row in audited(method, tasks):
        assert row["gram_error"] <= row["gram_bound"] + 1e-9 * row["gram_norm"]
        assert row["weight_error"] <= row["weight_bound"] * (1 + 1e-9) + 1e-6 * row["weight_norm"]
        assert row["score_error"] <= row["weight_bound"] * (1 + 1e-9) + 1e-6 * row["weight_norm"]
        assert row["weight_error"] <= row["weight_bound_sharper"] * (1 + 1e-9) + 1e-6 * row["weight_norm"]
        assert row["weight_bound_sharper"] <= row["weight_bound"] * (1 + 1e-9)
        assert 0 <= row["certified"] <= row["certified_sharper"] <= row["agree"] <= 100
        if isinstance(method, FedRAN):
            slack = 1e-9 * row["energy"]
            assert row["gram_error"] <= row["trace_error"] + slack
            assert row["trace_error"] <= row["tail_bound"] + slack
            assert row["tail_bound"] <= row["tail_bound_R"] + slack


EVERYTHING = [
    FedRAN(M=20, rank=20, bounds=True),
    CentredSketch(M=20, rank=20, bounds=True),
]


@pytest.mark.parametrize("method", EVERYTHING)
def test_nothing_is_lost_at_full_rank(method):
    method.ridge = 1.0
    tasks = draw_tasks(np.random.default_rng(0), 8, [2, 3], [[25, 1, 12], [6, 0, 30]])
    row = audited(method, tasks)[-1]
    assert row["gram_bound"] < 1e-9 * row["gram_norm"]
    assert row["gram_error"] < 1e-9 * row["gram_norm"]
    assert (row["certified"], row["agree"]) == (100, 100)
    if isinstance(method, FedRAN):
        assert (row["truncations"], row["eta_local"], row["eta_merge"], row["tail_bound"]) == (0, 0, 0, 0)
        assert abs(row["trace_error"]) < 1e-9 * row["energy"]


@pytest.mark.parametrize("rank", [2, 7, 15])
@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_corollary_2_is_that_of_full_spectra(order, rank):
    """Five clients and three tasks: what is dropped, and how often a summary goes through a merge that drops."""
    sizes = [[25, 1, 12, 9, 30], [6, 0, 30, 4, 4], [3, 2, 0, 0, 0]]
    tasks = draw_tasks(np.random.default_rng(3), 8, [2, 3, 2], sizes)
    method = FedRAN(M=20, rank=rank, ridge=1.0, merge=order, bounds=True)
    row = audited(method, tasks)[-1]
    expected = oracle.relative_tail(tasks, projection_of(learn(method, context_of(8), tasks)[0]), rank, order)
    tail = expected["eta_local"] + expected["eta_merge"] * expected["truncations"]
    expected |= {"tail_bound": tail * expected["energy"], "tail_bound_R": tail * expected.pop("RN")}
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-8)
    # The first client's summary goes through four merges in turn, one jointly, three in a tree; then through two.
    assert rank > 7 or row["truncations"] == {"sequential": 6, "joint": 3}[order]


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(0, 10**6))
def test_the_gap_of_two_inverses(error, ridge, seed):
    """At most error / (ridge (ridge + error)) for any pair, in either order, and that much for 0 and error I."""
    rng = np.random.default_rng(seed)
    A, D = (part @ part.T for part in rng.standard_normal((2, 6, 4)))
    B, eye = A + D * error / np.linalg.norm(D, 2), np.eye(6)
    gap = np.linalg.norm(np.linalg.inv(A + ridge * eye) - np.linalg.inv(B + ridge * eye), 2)
    rounding = 1e-14 / ridge  # of two inverses that are almost equal beside a wide ridge
    assert gap <= inverse_gap(error, ridge) * (1 + 1e-6) + rounding
    assert 1 / ridge - 1 / (ridge + error) == pytest.approx(inverse_gap(error, ridge), rel=1e-6, abs=1e-9 / ridge)
    assert inverse_gap(error, ridge) <= min(error / ridge**2, 1 / ridge) * (1 + 1e-12)


def test_bounds_shrink_with_the_rank_and_say_something():
    """A wide ridge makes Theorem 2 small enough to certify samples; FedRAN's default, 1e-3, never does."""
    tasks = draw_tasks(np.random.default_rng(0), 8, [2, 3], [[25, 1, 12], [6, 0, 30]])
    rows = [audited(FedRAN(M=20, rank=rank, ridge=1e4, bounds=True), tasks)[-1] for rank in (2, 8, 16)]
    assert rows[0]["gram_bound"] > rows[1]["gram_bound"] > rows[2]["gram_bound"] > 0
    assert rows[2]["certified"] > rows[0]["certified"]


@pytest.mark.parametrize("ridge", [1e-170, 1e-3, 1e200])
@pytest.mark.parametrize("method", [FedRAN(M=20, rank=4, bounds=True), CentredSketch(M=20, rank=4, bounds=True)])
def test_bounds_are_numbers_or_none(method, ridge):
    """A bound beyond all numbers has none; JSON has no infinity."""
    tasks = draw_tasks(np.random.default_rng(0), 8, [2, 3], [[25, 1, 12], [6, 0, 30]])
    for row in audited(type(method)(**{**vars(method), "ridge": ridge}), tasks):
        json.dumps(row, allow_nan=False)
        assert row["gram_error"] is not None
        # 1 / lambda^2 in FedRAN's; 1 / (lambda delta) in the sketch's.
        assert (row["weight_bound"] is None) == (ridge == 1e-170 and isinstance(method, FedRAN))


def test_no_audit_unless_asked_for():
    assert FedRAN().audits(context_of(8)) == {}
    assert CentredSketch().audits(context_of(8)) == {}
