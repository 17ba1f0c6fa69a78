"""Epsilon against numbers that do not come from the library: Balle and Wang's formula, and Renyi's divergence."""

from __future__ import annotations

import math
import sys

import mpmath
import numpy as np
import pytest
from scipy.special import comb, logsumexp

from fcl_bench.engine.ledger import Ledger
from fcl_bench.engine.noise import accountant
from fcl_bench.engine.noise.gaussian import Gaussian
from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.gradient.finetune import FineTune
from fcl_bench.training.knobs import Training
from tests.methods.harness import problem_of

dp = pytest.importorskip("dp_accounting", reason="pip install '.[privacy]'")


def delta_of(epsilon: float, multiplier: float) -> float:
    """Balle and Wang (2018), Thm. 8: Phi(1/(2z) - eps z) - e^eps Phi(-1/(2z) - eps z), to 60 digits."""
    with mpmath.workdps(60):
        z, eps = mpmath.mpf(multiplier), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(1 / (2 * z) - eps * z) - mpmath.exp(eps) * mpmath.ncdf(-1 / (2 * z) - eps * z))


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("multiplier", [0.1, 0.6, 1.0, 4.0, 30.0])
def test_one_release_has_the_epsilon_of_the_analytic_mechanism(multiplier, delta):
    epsilon = accountant.epsilon_of([multiplier], delta)
    if epsilon:
        assert delta_of(epsilon, multiplier) == pytest.approx(delta, rel=1e-6)
        assert accountant.multiplier_for(epsilon, delta, 1) == pytest.approx(multiplier, rel=1e-6)
    else:
        assert delta_of(0, multiplier) <= delta


def test_known_numbers():
    """The textbook: sigma 3.73 for (1, 1e-5), where the classical bound asks for 4.84."""
    assert accountant.multiplier_for(1.0, 1e-5, 1) == pytest.approx(3.73, abs=0.01)
    assert math.sqrt(2 * math.log(1.25 / 1e-5)) == pytest.approx(4.84, abs=0.01)
    assert accountant.epsilon_of([0.0], 1e-5) == math.inf
    assert accountant.epsilon_of([], 1e-5) == 0


def test_releases_of_the_same_data_compose():
    """Four with twice the noise are one: their losses add up to a Gaussian with the same mean and variance."""
    once = accountant.epsilon_of([1.5], 1e-5)
    assert accountant.epsilon_of([3.0] * 4, 1e-5) == pytest.approx(once, rel=1e-9)
    assert accountant.epsilon_of([3.0, 3.0, math.sqrt(4.5)], 1e-5) == pytest.approx(once, rel=1e-9)
    assert accountant.multiplier_for(once, 1e-5, 4) == pytest.approx(3.0, rel=1e-6)


def renyi_epsilon(slope: float, delta: float) -> float:
    """Canonne, Kamath and Steinke (2020), Prop. 12, of a divergence slope * a, over the orders 2 to 512."""
    orders = np.arange(2, 513)
    found = [slope * a + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders]
    return min(found)


def test_renyi_s_bound_of_rounds_that_all_take_part_in():
    for multiplier, rounds in ((4.0, 10), (10.0, 100)):
        found = accountant.epsilon_of_sampled([(50, 50, multiplier)] * rounds, 1e-5)
        assert found == pytest.approx(renyi_epsilon(rounds / (2 * multiplier**2), 1e-5), rel=0.02)
        exact = accountant.epsilon_of([multiplier] * rounds, 1e-5)
        assert exact < found < 1.2 * exact
    assert accountant.epsilon_of_sampled([(50, 5, 0.0)], 1e-5) == math.inf


def test_sampling_without_replacement_is_bounded_as_wang_and_others_do():
    """Their Theorem 9 for a mechanism without a finite epsilon; the library's bound is never above it."""
    multiplier, rounds, clients, present = 3.0, 50, 100, 10
    share = present / clients

    def whole(a: float) -> float:
        return a / (2 * multiplier**2)

    def sampled(a: int) -> float:
        terms = [0.0]
        second = min(math.log(4 * math.expm1(whole(2))), whole(2) + math.log(2))
        terms.append(2 * math.log(share) + math.log(comb(a, 2)) + second)
        terms += [
            j * math.log(share) + math.log(comb(a, j)) + (j - 1) * whole(j) + math.log(2) for j in range(3, a + 1)
        ]
        return rounds * float(logsumexp(terms)) / (a - 1)

    by_hand = min(sampled(a) + math.log1p(-1 / a) - (math.log(1e-5) + math.log(a)) / (a - 1) for a in range(2, 65))
    found = accountant.epsilon_of_sampled([(clients, present, multiplier)] * rounds, 1e-5)
    assert found <= by_hand * 1.001
    assert found < 0.5 * accountant.epsilon_of_sampled([(clients, clients, multiplier)] * rounds, 1e-5)
    more = [accountant.epsilon_of_sampled([(clients, m, multiplier)] * rounds, 1e-5) for m in (5, 10, 30)]
    assert more == sorted(more)
    noisier = accountant.multiplier_for_sampled(found, 1e-5, clients, present, rounds)
    assert noisier == pytest.approx(multiplier, rel=2e-3)


def ledger_of(rounds: list[tuple[int, list[int]]], clients: int = 4) -> Ledger:
    """Of (task, who sent something) for each round; all have labelled samples."""
    ledger, number = Ledger(clients), {}
    for task, senders in rounds:
        number[task] = number.get(task, -1) + 1
        sent = np.isin(np.arange(clients), senders) * 8
        rest = dict.fromkeys(("samples", "labelled"), 3) | dict.fromkeys(("accepted", "right", "down_bytes"), 0)
        ledger.add_round(
            task, number[task], "model", {"client": np.arange(clients), "up_bytes": sent, "client_seconds": 0.0, **rest}
        )
    return ledger


def test_samples_of_different_tasks_are_released_once_each():
    knobs, method = Gaussian(multiplier=1.0), STSA()
    found = knobs.guarantee(method, problem_of(4), 3, ledger_of([(0, [0, 1]), (1, [0, 1, 2]), (2, [3])]))
    assert (found["releases"], found["unit"], found["sampled"], found["of_sums"]) == (1, "sample", False, False)
    assert found["epsilon"] == pytest.approx(accountant.epsilon_of([1.0], 1e-5))
    # Twice in one task is twice the same samples.
    again = knobs.guarantee(method, problem_of(4), 3, ledger_of([(0, [0, 1]), (0, [1]), (1, [0])]))
    assert (again["releases"], again["epsilon"]) == (2, pytest.approx(accountant.epsilon_of([1.0, 1.0], 1e-5)))
    none = Gaussian(multiplier=0.0).guarantee(method, problem_of(4), 3, ledger_of([(0, [0])]))
    assert (none["epsilon"], none["accountant"]) == (None, None)


def test_a_client_is_released_in_every_round_it_takes_part_in():
    method = FineTune(training=Training(rounds=2))
    rounds = [(0, [0, 1, 2, 3]), (0, [0, 1]), (1, [0]), (1, [1, 2])]
    found = Gaussian(multiplier=2.0, unit="client").guarantee(method, problem_of(4), 2, ledger_of(rounds))
    assert (found["releases"], found["epsilon"]) == (3, pytest.approx(accountant.epsilon_of([2.0] * 3, 1e-5)))
    # For a target all rounds count that there can be, so what is reported is no more than it.
    aimed = Gaussian(epsilon=2.0, unit="client").guarantee(method, problem_of(4), 2, ledger_of(rounds))
    assert aimed["multiplier"] == pytest.approx(accountant.multiplier_for(2.0, 1e-5, 4))
    assert 1 < aimed["epsilon"] < 2.0


def test_a_sum_has_the_noise_of_those_who_sent_something():
    method = STSA()
    knobs = Gaussian(multiplier=1.0, share_of=4)
    whole = knobs.guarantee(method, problem_of(4), 1, ledger_of([(0, [0, 1, 2, 3])]))
    assert whole["epsilon"] == pytest.approx(accountant.epsilon_of([1.0], 1e-5))
    less = knobs.guarantee(method, problem_of(4), 2, ledger_of([(0, [0, 1, 2, 3]), (1, [0])]))
    assert less["epsilon"] == pytest.approx(accountant.epsilon_of([0.5], 1e-5))
    assert knobs.release(method).deviation["G"] == Gaussian(multiplier=0.5).release(method).deviation["G"]


def test_only_sums_count_on_who_is_not_seen():
    method = FineTune(training=Training(rounds=10, fraction=0.5))
    rounds = [(0, [round_ % 4, (round_ + 1) % 4]) for round_ in range(10)]
    seen = Gaussian(multiplier=3.0, unit="client").guarantee(method, problem_of(4), 1, ledger_of(rounds))
    hidden = Gaussian(multiplier=3.0, unit="client", share_of=2).guarantee(method, problem_of(4), 1, ledger_of(rounds))
    assert (seen["sampled"], hidden["sampled"]) == (False, True)
    assert hidden["epsilon"] == pytest.approx(accountant.epsilon_of_sampled([(4, 2, 3.0)] * 10, 1e-5))


def test_without_the_library_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for knobs in (Gaussian(epsilon=1.0), Gaussian(multiplier=1.0)):
        with pytest.raises(UserError, match="not installed") as refused:
            knobs.check(STSA(), problem_of(4))
        assert "pip install '.[privacy]'" in str(refused.value)
    Gaussian(multiplier=0.0).check(STSA(), problem_of(4))
