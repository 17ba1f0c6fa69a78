"""A site's noise: whole steps under a key that the server does not have, and what it promises."""

from __future__ import annotations

import dataclasses
import math
import sys

import mpmath
import numpy as np
import pytest
import torch

from fcl_bench.engine.ledger import Ledger
from fcl_bench.errors import UserError
from fcl_bench.linalg.discrete_gaussian import SCALE
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.noise.gaussian import Gaussian, epsilon_of
from fcl_bench.options.noise.mechanism import DPMechanism, NoisyStatistics, NoisyUpdates, simulated
from fcl_bench.protocol.fields import COLUMN, COUNT, SQUARE
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from tests.methods.harness import context_of

dp = pytest.importorskip("dp_accounting", reason="pip install '.[privacy]'")
pytest.importorskip("cryptography", reason="pip install '.[privacy]'")
secrets = pytest.importorskip("fcl_bench.options.noise.secret")

SECRET = bytes(range(32))
RELEASE = DPMechanism(1.0, {"G": SQUARE, "S": COLUMN, "n": COUNT}, {"G": 2.0, "S": 3.0, "n": 40.0})
ZEROS = {"G": torch.zeros(30, 30).double(), "S": torch.zeros(30, 20).double(), "n": torch.zeros(20, dtype=torch.int32)}


def noisy(values: dict[str, torch.Tensor], key: bytes = SECRET, client: int = 0, start=None, **about) -> Message:
    step = NoisyStatistics(secrets.secret(key, 1.0), RELEASE)
    if start is not None:
        step.receive(Message({"seed": torch.tensor(start)}), client)
    return step.send(Message(values, **about), client)


def test_every_number_is_a_whole_number_of_steps_and_has_its_deviation():
    drawn = [noisy(ZEROS, client=client) for client in range(60)]
    wide = secrets.widening(1.0, 900 + 600 + 20, 0)
    assert 1 < wide < 1 + 1e-7
    G, S, n = (torch.stack([own[name] for own in drawn]).double() for name in ("G", "S", "n"))
    assert torch.equal(G, G.mT)
    upper = torch.triu_indices(30, 30, 1)
    parts = (
        (G.diagonal(dim1=1, dim2=2), 2.0),
        (G[:, upper[0], upper[1]], 2.0 / math.sqrt(2)),
        (S, 3.0),
    )
    for values, deviation in parts:
        steps = (values * (SCALE / (wide * deviation))).numpy()
        assert np.abs(steps - steps.round()).max() < 1e-4
        assert float(values.std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * values.numel()))
        assert abs(float(values.mean())) < 5 * deviation / math.sqrt(values.numel())
    assert float(n.std()) == pytest.approx(40, rel=0.1)
    assert drawn[0]["n"].dtype == torch.int32


def test_values_are_kept_to_half_a_step():
    values = torch.randn(30, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = values + values.T
    one, zero = noisy({"G": values}), noisy({"G": 0 * values})
    assert not torch.equal(one["G"] - values, zero["G"]), "other samples have other noise"
    none = DPMechanism(1.0, {"G": SQUARE}, {"G": 0.0})
    assert torch.equal(NoisyStatistics(secrets.secret(SECRET, 0.0), none).send(Message({"G": values}), 0)["G"], values)


def test_the_triangle_that_does_not_count_tells_nothing():
    """Entries below the diagonal may be rounded in another way, and the same noise on both would cancel."""
    values = torch.ones(4, 4).double()
    values[2, 0] += 1e-9
    noise = secrets.SecretNoise(lambda count: np.zeros(count, dtype=np.uint64), 1.0)
    found = noise.on(values, 0.5, symmetric=True)
    assert torch.equal(found, found.T)


def test_the_same_upload_has_the_same_noise_and_any_other_has_another():
    values = {name: tensor + 1 for name, tensor in ZEROS.items()}
    nudged = {**values, "S": values["S"].clone()}
    nudged["S"][3, 4] += 1e-12
    first = noisy(values, start=5)
    assert all(torch.equal(first[name], noisy(values, start=5)[name]) for name in first)
    others = [
        noisy(values, start=6),
        noisy(nudged, start=5),
        noisy(values, start=5, client=1),
        noisy(values, start=5, task=1),
        noisy(values, start=5, round=1),
        *(noisy(values, flipped(bit), start=5) for bit in range(0, 256, 5)),
    ]
    assert all(float((first["S"] - other["S"]).abs().min()) > 0 for other in others)
    for other in others:
        apart = (first["S"] - other["S"]).flatten()
        assert float(apart.std()) == pytest.approx(3 * math.sqrt(2), rel=0.2), "independent, not merely different"


def flipped(bit: int) -> bytes:
    return (int.from_bytes(SECRET, "big") ^ 1 << bit).to_bytes(32, "big")


def seeds_found(shown: torch.Tensor, guesses: range) -> list[int]:
    """The old attack: seeds of 32 bits whose noise is what a column of zeros in an upload S (2, 8) shows."""
    draw, (first, second) = torch.Generator(), (shown / 3.0).tolist()
    found = []
    for seed in guesses:
        own = torch.randn(2, 8, generator=draw.manual_seed(seed), dtype=torch.float64)
        if abs(own[0, 3].item() - first) < 1e-6 and abs(own[1, 3].item() - second) < 1e-6:
            found.append(seed)
    return found


@pytest.mark.parametrize("guesses", [2**11, pytest.param(2**20, marks=pytest.mark.slow)])
def test_a_column_of_zeros_tells_no_seed(guesses):
    """What finds the seed of simulated noise, whose generator uses 32 bits of any seed, finds nothing in a site's."""
    own = DPMechanism(1.0, {"S": COLUMN}, {"S": 3.0})
    upload = Message({"S": torch.zeros(2, 8).double()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fcl_bench.options.noise.mechanism.derived_seed", lambda *_: 2**40 + 2000)
        old = NoisyStatistics(simulated(0), own).send(upload, 0)["S"]
    assert seeds_found(old[:, 3], range(2**11)) == [2000]
    new = NoisyStatistics(secrets.secret(SECRET, 1.0), own).send(upload, 0)["S"]
    assert seeds_found(new[:, 3], range(guesses)) == []


def test_without_ciphers_one_line_says_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "fcl_bench.options.secure.masks", raising=False)
    for name in [name for name in sys.modules if name.startswith("cryptography.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"cryptography is not installed.*pip install '.\[privacy\]'"):
        secrets.secret(SECRET, 1.0)


def test_the_key_is_as_long_as_the_secret(monkeypatch):
    """Every key on the way has 256 bits: the cipher takes no shorter one."""
    keys = []
    monkeypatch.setattr(
        "fcl_bench.options.secure.masks.key_words", lambda key: keys.append(key) or (lambda n: np.zeros(n, np.uint64))
    )
    source = secrets.secret(SECRET, 1.0)
    for client in range(3):
        source(Message(ZEROS), client, None)
    assert secrets.KEY == len(SECRET) == 32
    assert {len(key) for key in keys} == {32}
    assert len(set(keys)) == 3


def test_models_are_clipped_and_noisy_on_their_change_alone():
    """A broadcast of huge numbers swallows neither the change nor the noise, as it did where both were added to it."""
    step = NoisyUpdates(secrets.secret(SECRET, 3.0), clip=0.5, deviation=3.0)
    start = {"w": torch.full((50, 40), 1e3).double()}
    step.receive(Message(start, "model"), 0)
    sent = step.send(Message({"w": start["w"] + 7.0}, "model"), 0)["w"] - start["w"]
    assert float(sent.std()) == pytest.approx(3.0, rel=0.1)
    quiet = NoisyUpdates(secrets.secret(SECRET, 0.0), clip=0.5, deviation=0.0)
    quiet.receive(Message(start, "model"), 0)
    left = quiet.send(Message({"w": start["w"] + 7.0}, "model"), 0)["w"] - start["w"]
    assert float(left.norm()) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_numbers_that_no_step_holds_do_not_leave(bad):
    with pytest.raises(UserError, match="not finite, or too large"):
        noisy({"S": torch.full((2, 3), bad, dtype=torch.float64)})


def test_rounding_is_paid_for_by_wider_noise():
    """With R/gamma the sensitivity, in steps, of n rounded numbers that are sums of m samples: 1/z at most."""
    u = 2.0**-53
    for multiplier in (1e-3, 0.3, 1.0, 40.0):
        for numbers in (1, 10**4, 10**8):
            for samples in (0, 10, 10**5):
                wide = secrets.widening(multiplier, numbers, samples)
                f = 2 * u * (samples * (samples + 2) + numbers + 2)
                reached = (1 + f) / (wide * multiplier) + math.sqrt(numbers) / math.sqrt(SCALE**2 - 9)
                assert reached <= 1 / multiplier
                assert wide < 1.001
    for given in ((1.0, 100, 10**7), (1e6, 10**6, 10), (1e12, 10**6, 10)):
        with pytest.raises(UserError, match="round away"):
            secrets.widening(*given)


def test_sums_in_float32_round_too_much():
    context = dataclasses.replace(context_of(4), dtype=torch.float32)
    with pytest.raises(UserError, match="dtype=float32.*dtype=float64"):
        Gaussian(multiplier=1.0).middleware(STSA(), context, 2, SECRET)


def law(R: float, reach: int) -> np.ndarray:
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * R**2))
    return weights / weights.sum()


def gaussian_delta(epsilon: float, shift: float, deviation: float) -> float:
    """Balle and Wang (2018), Thm. 8."""
    z = mpmath.mpf(deviation) / shift
    return float(mpmath.ncdf(1 / (2 * z) - epsilon * z) - mpmath.exp(epsilon) * mpmath.ncdf(-1 / (2 * z) - epsilon * z))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(("R", "shift"), [(6.0, (5,)), (6.0, (1,)), (5.0, (4, 3)), (5.0, (0, 2)), (9.0, (2, 7))])
def test_the_discrete_gaussian_is_as_private_as_one_that_is_hardly_narrower(R, shift, epsilon):
    """The theorem of the docstring, with s = 1 (kappa < 6e-9), against the exact sum over all integers."""
    reach = int(12 * R)
    P = law(R, reach)
    moved = [np.roll(P, step) for step in shift]  # the ends are below 1e-30
    whole, other = P, moved[0]
    for step in moved[1:]:
        whole, other = np.outer(whole, P).ravel(), np.outer(other, step).ravel()
    exact = float(np.maximum(whole - math.exp(epsilon) * other, 0).sum())
    bound = gaussian_delta(epsilon, math.hypot(*shift), math.sqrt(R**2 - 1))
    assert exact <= bound + 1e-7
    assert exact > 0.2 * bound or bound < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("R", "shift", "delta"),
    [(200.0, 100, 1e-5), (200.0, 200, 1e-5), (300.0, 600, 1e-6), (150.0, 20, 1e-4), (64, 8, 1e-9)],
)
def test_epsilon_is_that_of_the_library_s_own_discrete_gaussian(R, shift, delta):
    """dp-accounting counts a discrete Gaussian by its privacy loss distribution, without any theorem of ours."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    exact = pld.from_discrete_gaussian_mechanism(R, sensitivity=shift, value_discretization_interval=1e-4)
    ours = epsilon_of([math.sqrt(R**2 - 9) / shift], delta)
    assert exact.get_epsilon_for_delta(delta) == pytest.approx(ours, rel=2e-3, abs=2e-4)


@pytest.mark.parametrize(("multiplier", "delta"), [(0.3, 1e-5), (0.6, 1e-5), (1.0, 1e-5), (3.73, 1e-5), (2.0, 1e-8)])
def test_epsilon_of_a_site_s_run_is_the_library_s(multiplier, delta):
    ledger = Ledger(2)
    row = dict.fromkeys(("samples", "labelled"), 3) | dict.fromkeys(("accepted", "right", "down_bytes"), 0)
    clients = {"client": np.arange(2), "up_bytes": np.full(2, 8), "client_seconds": 0.0}
    ledger.add_round(0, 0, "statistics", {**clients, **row})
    knobs = Gaussian(multiplier=multiplier, delta=delta)
    here, at_sites = (knobs.guarantee(STSA(), context_of(4), 1, ledger, at_sites=own) for own in (False, True))
    assert at_sites["epsilon"] == pytest.approx(dp.get_epsilon_gaussian(multiplier, delta), rel=1e-12)
    assert at_sites["against_server"]
    assert at_sites["generator"].startswith("discrete Gaussian of AES-256")
    assert not here["against_server"]
    assert here["generator"].startswith("simulated")
    assert {**here, **{key: at_sites[key] for key in ("generator", "against_server")}} == at_sites
    none = Gaussian(multiplier=0.0).guarantee(STSA(), context_of(4), 1, ledger, at_sites=True)
    assert (none["generator"], none["against_server"]) == (None, False)


def test_updates_of_a_site_pay_for_the_multiplier_of_a_round():
    knobs, method = Gaussian(epsilon=2.0, unit="client"), FedAvg(training=Training(rounds=3))
    with pytest.MonkeyPatch.context() as patch:
        given = []
        patch.setattr(secrets, "secret", lambda *args: given.append(args) or simulated(0))
        knobs.middleware(method, context_of(4), 2, SECRET, samples=50)
        context = context_of(4)
        release = Gaussian(multiplier=1.5).release(STSA(), context)
        Gaussian(multiplier=1.5).middleware(
            STSA(), dataclasses.replace(context, release=release), 2, SECRET, samples=50
        )
    assert given == [(SECRET, knobs._multiplier(method, 2), 0), (SECRET, 1.5, 50)]
