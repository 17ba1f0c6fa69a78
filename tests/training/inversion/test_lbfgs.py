"""Many problems at a time against torch's own L-BFGS on each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars.inversion import BatchedLBFGS

STARTS = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 6)))


def bent(x: torch.Tensor) -> torch.Tensor:
    """A narrow curved valley in each row (Rosenbrock, milder)."""
    return (5 * (x[:, 1:] - x[:, :-1].square()).square() + (1 - x[:, :-1]).square()).sum(dim=1)


def bowl(x: torch.Tensor) -> torch.Tensor:
    return (x.square() * torch.arange(1, x.shape[1] + 1)).sum(dim=1)


def evaluation(loss):
    def evaluate(x: torch.Tensor):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            losses = loss(x)
            (slopes,) = torch.autograd.grad(losses.sum(), x)
        return losses.detach(), slopes

    return evaluate


def by_torch(loss, start: torch.Tensor, rate: float, calls: int, inner: int, history: int = 100):
    """Points after each call, and losses before it."""
    x = start[None].clone().requires_grad_()
    solver = torch.optim.LBFGS([x], lr=rate, max_iter=inner, max_eval=10**6, history_size=history)

    def closure():
        solver.zero_grad()
        value = loss(x).sum()
        value.backward()
        return value

    points, losses = [], []
    for _ in range(calls):
        losses.append(solver.step(closure).item())
        points.append(x.detach()[0].clone())
    return torch.stack(points), losses


@pytest.mark.parametrize("history", [100, 3])
@pytest.mark.parametrize(("loss", "rate", "inner"), [(bent, 0.1, 4), (bent, 0.3, 1), (bowl, 1.0, 5), (bowl, 0.5, 20)])
def test_each_context_moves_as_in_torch(loss, rate, inner, history):
    """Point for point; the bowls also end: their slopes vanish, and they rest where torch's do."""
    calls = 10
    solver = BatchedLBFGS(STARTS, evaluation(loss), rate, history)
    before, points = [], []
    for _ in range(calls):
        before.append(solver.iterate(inner))
        points.append(solver.x)
    for context, start in enumerate(STARTS):
        wanted, losses = by_torch(loss, start, rate, calls, inner, history)
        torch.testing.assert_close(torch.stack(points)[:, context], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose([float(value[context]) for value in before], losses, rtol=1e-4, atol=1e-8)


def test_the_first_step_is_the_slope_itself_where_that_is_short():
    """|gradient|_1 is below 1, and nothing is divided by it."""
    solver = BatchedLBFGS(STARTS / 100, evaluation(bowl), 0.3)
    solver.iterate(1)
    torch.testing.assert_close(solver.x, STARTS / 100 * (1 - 0.6 * torch.arange(1, 7)))


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_context_rests_as_soon_as_torchs_does(rate):
    """By the number of times that the loss is asked for."""
    asked = 0

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += 1
        return bowl(x)

    counts = []
    for solve in (
        lambda: by_torch(counted, STARTS[0], rate, 4, 50),
        lambda: [
            solver.iterate(50) for solver in [BatchedLBFGS(STARTS[:1], evaluation(counted), rate)] for _ in range(4)
        ],
    ):
        asked = 0
        solve()
        counts.append(asked)
    assert counts[0] == counts[1] < 150


def test_it_finds_the_bottom():
    """Each call ends where the loss hardly changes any more, so that it takes several."""
    solver = BatchedLBFGS(STARTS, evaluation(bowl), 1.0)
    for _ in range(10):
        solver.iterate(10)
    torch.testing.assert_close(solver.x, torch.zeros_like(STARTS), rtol=0, atol=1e-4)


def test_the_argument_stays_and_nothing_is_drawn():
    start = STARTS.clone()
    ends = []
    for _ in range(2):
        solver = BatchedLBFGS(start, evaluation(bent), 0.3)
        solver.iterate(30)
        ends.append(solver.x)
    assert torch.equal(start, STARTS)
    assert torch.equal(*ends)


def test_a_context_that_is_lost_stays_at_its_last_finite_point_and_disturbs_nobody():
    def falls(x: torch.Tensor) -> torch.Tensor:
        """The second problem goes down to where the logarithm of a negative number waits."""
        return torch.where(torch.arange(len(x)) == 1, 200 * x[:, 0].log() + x[:, 0], bowl(x))

    starts = STARTS[:3].abs() + 0.5
    solver = BatchedLBFGS(starts, evaluation(falls), 0.5)
    for _ in range(6):
        solver.iterate(5)
    assert solver.lost.tolist() == [False, True, False]
    assert bool(solver.x.isfinite().all())
    assert bool(falls(solver.x).isfinite().all())
    rest = BatchedLBFGS(starts[[0, 2]], evaluation(bowl), 0.5)
    for _ in range(6):
        rest.iterate(5)
    torch.testing.assert_close(solver.x[[0, 2]], rest.x, rtol=1e-9, atol=1e-12)


def test_no_iteration_only_looks():
    solver = BatchedLBFGS(STARTS, evaluation(bowl), 1.0)
    torch.testing.assert_close(solver.iterate(0), bowl(STARTS))
    assert torch.equal(solver.x, STARTS)
