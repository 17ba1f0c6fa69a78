"""Epsilon against numbers that do not come from the library: Balle and Wang's formula, and Renyi's divergence."""

from __future__ import annotations

import math
import sys

import mpmath
import numpy as np
import pytest

from fcl_bench.engine.ledger import Ledger
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.faults.choices import ListedFaults
from fcl_bench.options.noise.gaussian import Gaussian, epsilon_of, multiplier_for
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.training.knobs import Training
from tests.engine.secure.summing import federation
from tests.methods.harness import context_of

dp = pytest.importorskip("dp_accounting", reason="pip install '.[privacy]'")


def delta_of(epsilon: float, multiplier: float) -> float:
    """Balle and Wang (2018), Thm. 8: Phi(1/(2z) - eps z) - e^eps Phi(-1/(2z) - eps z), to 60 digits."""
    with mpmath.workdps(60):
        z, eps = mpmath.mpf(multiplier), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(1 / (2 * z) - eps * z) - mpmath.exp(eps) * mpmath.ncdf(-1 / (2 * z) - eps * z))


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("multiplier", [0.1, 0.6, 1.0, 4.0, 30.0])
def test_one_release_has_the_epsilon_of_the_analytic_mechanism(multiplier, delta):
    epsilon = epsilon_of([multiplier], delta)
    if epsilon:
        assert delta_of(epsilon, multiplier) == pytest.approx(delta, rel=1e-6)
        assert multiplier_for(epsilon, delta, 1) == pytest.approx(multiplier, rel=1e-6)
    else:
        assert delta_of(0, multiplier) <= delta


def test_known_numbers():
    """The textbook: sigma 3.73 for (1, 1e-5), where the classical bound asks for 4.84."""
    assert multiplier_for(1.0, 1e-5, 1) == pytest.approx(3.73, abs=0.01)
    assert math.sqrt(2 * math.log(1.25 / 1e-5)) == pytest.approx(4.84, abs=0.01)
    assert epsilon_of([0.0], 1e-5) == math.inf
    assert epsilon_of([], 1e-5) == 0


def test_releases_of_the_same_data_compose():
    """Four with twice the noise are one: their losses add up to a Gaussian with the same mean and variance."""
    once = epsilon_of([1.5], 1e-5)
    assert epsilon_of([3.0] * 4, 1e-5) == pytest.approx(once, rel=1e-9)
    assert epsilon_of([3.0, 3.0, math.sqrt(4.5)], 1e-5) == pytest.approx(once, rel=1e-9)
    assert multiplier_for(once, 1e-5, 4) == pytest.approx(3.0, rel=1e-6)


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
    found = knobs.guarantee(method, context_of(4), 3, ledger_of([(0, [0, 1]), (1, [0, 1, 2]), (2, [3])]))
    assert (found["releases"], found["unit"], found["of_sums"]) == (1, "sample", False)
    assert found["epsilon"] == pytest.approx(epsilon_of([1.0], 1e-5))
    # Twice in one task is twice the same samples.
    again = knobs.guarantee(method, context_of(4), 3, ledger_of([(0, [0, 1]), (0, [1]), (1, [0])]))
    assert (again["releases"], again["epsilon"]) == (2, pytest.approx(epsilon_of([1.0, 1.0], 1e-5)))
    none = Gaussian(multiplier=0.0).guarantee(method, context_of(4), 3, ledger_of([(0, [0])]))
    assert (none["epsilon"], none["accountant"]) == (None, None)


def test_a_client_is_released_in_every_round_it_takes_part_in():
    method = FedAvg(training=Training(rounds=2))
    rounds = [(0, [0, 1, 2, 3]), (0, [0, 1]), (1, [0]), (1, [1, 2])]
    found = Gaussian(multiplier=2.0, unit="client").guarantee(method, context_of(4), 2, ledger_of(rounds))
    assert (found["releases"], found["epsilon"]) == (3, pytest.approx(epsilon_of([2.0] * 3, 1e-5)))
    # For a target all rounds count that there can be, so what is reported is no more than it.
    aimed = Gaussian(epsilon=2.0, unit="client").guarantee(method, context_of(4), 2, ledger_of(rounds))
    assert aimed["multiplier"] == pytest.approx(multiplier_for(2.0, 1e-5, 4))
    assert 1 < aimed["epsilon"] < 2.0


def test_a_sum_has_the_noise_of_those_who_sent_something():
    method = STSA()
    knobs = Gaussian(multiplier=1.0, share_of=4)
    whole = knobs.guarantee(method, context_of(4), 1, ledger_of([(0, [0, 1, 2, 3])]))
    assert whole["epsilon"] == pytest.approx(epsilon_of([1.0], 1e-5))
    less = knobs.guarantee(method, context_of(4), 2, ledger_of([(0, [0, 1, 2, 3]), (1, [0])]))
    assert less["epsilon"] == pytest.approx(epsilon_of([0.5], 1e-5))
    share, half = (noise.release(method, context_of(4)) for noise in (knobs, Gaussian(multiplier=0.5)))
    assert share.deviation["G"] == half.deviation["G"]


@pytest.mark.parametrize("failing", ["silent", "late"])
def test_of_masked_uploads_those_in_the_sum_count(failing):
    """Who fails after its keys has sent bytes, and a late upload stays masked: neither releases anything."""
    turns = [f"{client}@0.{client}" for client in range(4)]
    method = FedAvg(training=Training(rounds=4, epochs=1, batch_size=8, lr=0.05, augment="none"), trains="features")
    run = federation(method, SecureSums(), ListedFaults(**{failing: turns}), [[8] * 4])
    run.run(lambda _: None)
    rows = [row for row in run.state.ledger.uploads if row.lost or row.late]
    assert [(row.client, row.round) for row in rows] == [(client, client) for client in range(4)]
    assert all(row.up_bytes for row in rows)
    knobs = Gaussian(multiplier=2.0, unit="client")
    found = knobs.guarantee(method, run.context, 1, run.state.ledger)
    assert (found["releases"], found["epsilon"]) == (3, pytest.approx(epsilon_of([2.0] * 3, 1e-5)))
    # Shares of the noise of four are missing in a sum of three.
    shared = Gaussian(multiplier=2.0, unit="client", share_of=4).guarantee(method, run.context, 1, run.state.ledger)
    assert shared["epsilon"] == pytest.approx(epsilon_of([2.0 * math.sqrt(3 / 4)] * 3, 1e-5))


def test_without_masks_a_late_upload_counts():
    method = FedAvg(training=Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none"), trains="features")
    run = federation(method, None, ListedFaults(late=["0@0.0"]), [[8] * 2])
    run.run(lambda _: None)
    assert Gaussian(multiplier=2.0, unit="client").guarantee(method, run.context, 1, run.state.ledger)["releases"] == 2


def test_an_aim_that_is_missed_is_told(caplog):
    knobs = Gaussian(epsilon=2.0, share_of=4)
    knobs.guarantee(STSA(), context_of(4), 1, ledger_of([(0, [0, 1, 2, 3])]))
    assert not caplog.messages
    found = knobs.guarantee(STSA(), context_of(4), 2, ledger_of([(0, [0, 1, 2, 3]), (1, [0])]))
    assert found["epsilon"] > 2
    assert caplog.messages[0].startswith("noise.epsilon=2 is not kept to: some sums are of fewer uploads")


def test_drawing_clients_gains_nothing_since_the_server_draws_them():
    """It is the server that asks those drawn, masks or not: a sum promises as much as one upload with all its noise."""
    method = FedAvg(training=Training(rounds=10, fraction=0.5))
    ledger = ledger_of([(0, [round_ % 4, (round_ + 1) % 4]) for round_ in range(10)])
    alone, summed = (
        Gaussian(multiplier=3.0, unit="client", share_of=n).guarantee(method, context_of(4), 1, ledger)
        for n in (None, 2)
    )
    assert summed["epsilon"] == pytest.approx(alone["epsilon"]) == pytest.approx(epsilon_of([3.0] * 6, 1e-5))


def test_without_the_library_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for knobs in (Gaussian(epsilon=1.0), Gaussian(multiplier=1.0)):
        with pytest.raises(UserError, match="not installed") as refused:
            knobs.check(STSA(), context_of(4))
        assert "pip install '.[privacy]'" in str(refused.value)
    Gaussian(multiplier=0.0).check(STSA(), context_of(4))
