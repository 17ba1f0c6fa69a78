"""The centred sketch against its oracle, and its properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.errors import UserError
from fcl_bench.linalg.solve import relative_rounding
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch, CentredSketchServer
from fcl_bench.methods.closed_form.ridge import Estimate
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.typed import typed_instance
from tests.methods import centred_sketch_oracle as oracle
from tests.methods.harness import (
    CPU,
    context_of,
    draw_tasks,
    learn,
    on_wire,
    projection_of,
    random_tasks,
    relative_error,
    shard_of,
    stream_of,
    turn,
)


@pytest.mark.slow_cases("1-300-15")
@pytest.mark.parametrize("rank", [0, 1, 4, 15])
@pytest.mark.parametrize("M", [None, 20, 300])
@pytest.mark.parametrize("seed", range(4))
def test_scores_agree_with_the_oracle(seed, M, rank):
    """The server works in factors where M is 300, and with the whole matrix where it is 8 or 20."""
    tasks, ridge = random_tasks(seed, 9), float(10.0 ** (seed - 1))
    rank = min(rank, 8 if M is None else M)
    server, classifiers = learn(CentredSketch(M=M, rank=rank, ridge=ridge), context_of(8, seed), tasks)
    expected = oracle.centred_sketch(tasks, projection_of(server), rank, ridge)
    for ours, theirs in zip(classifiers, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-8


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), rank=st.integers(0, 25))
def test_the_trace_is_kept_at_every_rank(seed, rank):
    tasks = random_tasks(seed, 9)
    server, _ = learn(CentredSketch(M=25, rank=rank), context_of(8), tasks)
    assert isinstance(server, CentredSketchServer)
    P = projection_of(server)
    H = np.concatenate([np.maximum(Z @ P, 0) for clients in tasks for Z, _ in clients])
    assert float(server.gram().trace()) == pytest.approx(np.square(H).sum(), rel=1e-10)


@pytest.mark.parametrize("rank", [40, 90])
@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_a_rank_that_covers_every_client_gives_stsa(rank, ridge):
    """r at least n_kt, and beyond it: nothing is dropped."""
    tasks = draw_tasks(np.random.default_rng(0), 8, [3, 2], [[40, 1, 12], [25, 0, 30]])
    server, ours = learn(CentredSketch(M=90, rank=rank, ridge=ridge), context_of(8), tasks)
    _, exact = learn(STSA(M=90, gamma=ridge), context_of(8), tasks)
    H = np.maximum(np.random.default_rng(9).standard_normal((40, 8)) @ projection_of(server), 0)
    for W, theirs in zip(ours, exact, strict=True):
        scores = H @ theirs.numpy()
        assert np.abs(H @ W.numpy() - scores).max() < 1e-8 * np.abs(scores).max()
        if ridge == 1.0:
            assert relative_error(W, theirs.numpy()) < 1e-8


@pytest.mark.slow
def test_factors_and_the_whole_matrix_agree():
    rng = np.random.default_rng(1)
    factors, whole = (Estimate(100, torch.float64, CPU, low_rank) for low_rank in (True, False))
    B, rounding = torch.zeros(100, 4, dtype=torch.float64), relative_rounding(torch.float64)
    for width in (3, 0, 7, 12):
        F = torch.from_numpy(rng.standard_normal((100, width)) * np.geomspace(1, 100, width or 1)[:width])
        B = B + torch.from_numpy(rng.standard_normal((100, 4)))
        factors.add_factor(F)
        whole.add_factor(F)
        for ridge in (1e-3, 1.0, 1e3):
            W = factors.solve(B, ridge, rounding).W
            exact = np.linalg.solve(whole.matrix.numpy() + ridge * np.eye(100), B.numpy())
            # The condition number is up to 1e10.
            assert relative_error(W, exact) < 1e-6
            assert relative_error(whole.solve(B, ridge, rounding).W, exact) < 1e-6
    torch.testing.assert_close(factors.matrix, whole.matrix)
    assert (set(factors.state_dict()), set(whole.state_dict())) == ({"factor"}, {"G"})


def test_the_sum_is_kept_as_whichever_is_smaller():
    total = Estimate(50, torch.float64, CPU, low_rank=True)
    for number in range(1, 8):
        total.add_factor(torch.ones(50, 10, dtype=torch.float64))
        assert set(total.state_dict()) == ({"factor"} if number < 5 else {"G"})
        assert sum(tensor.numel() for tensor in total.state_dict().values()) <= 50 * 50


@pytest.mark.parametrize(("rank", "samples"), [(0, 30), (6, 30), (6, 3), (6, 1)])
def test_the_upload_has_the_documented_size(rank, samples):
    method, context = CentredSketch(M=40, rank=rank), context_of(8, wire="float32")
    Z = np.random.default_rng(4).standard_normal((samples, 8))
    tasks = [[(Z, np.arange(samples) % 5)]]
    [task] = stream_of(tasks)
    server = method.server(context)
    server.start_task(task)
    message = turn(method.client(context), shard_of(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    classes = len(task.new_columns)
    # Centring takes a dimension for each class held; directions of zero length are left out.
    r = min(rank, samples - min(classes, samples))
    assert on_wire(message, method, context).nbytes == 4 * (40 * r + r + 40 * classes + classes + 1)


def test_impossible_ranks_are_refused():
    with pytest.raises(UserError, match="method.rank=-1 is out of range"):
        typed_instance(CentredSketch, {"rank": -1}, "method")
    with pytest.raises(UserError, match="method.rank=9 is more than the 8 features"):
        CentredSketch(M=None, rank=9).check(context_of(8), [2])


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_coarse_wires_leave_the_estimate_positive(wire):
    """sigma^2 - tau may fall below zero by rounding; the server then takes zero."""
    tasks = draw_tasks(np.random.default_rng(7), 8, [3], [[30, 12]])
    server, [W] = learn(CentredSketch(M=30, rank=12, ridge=1.0), context_of(8, wire=wire), tasks)
    assert isinstance(server, CentredSketchServer)
    assert np.linalg.eigvalsh(server.gram())[0] > -1e-9
    assert torch.isfinite(W).all()
