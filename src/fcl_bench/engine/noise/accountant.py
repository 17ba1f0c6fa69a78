"""What noise promises, as Google's dp-accounting counts it. Multipliers are noise over the replace-one sensitivity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module, metadata
from types import ModuleType

from fcl_bench.errors import UserError, installing

_PACKAGE = "dp-accounting"
#: Of a round: how many clients could have taken part, how many did, and the multiplier of their sum.
Sampled = tuple[int, int, float]


def library() -> ModuleType:
    """dp_accounting. Raises a `UserError` that says how to install it."""
    try:
        return import_module("dp_accounting")
    except ModuleNotFoundError as error:
        raise UserError(
            f"noise=gaussian: {error.name} is not installed, and it is what counts epsilon",
            f"noise=none, or {installing('privacy')}",
        ) from error


def version() -> str:
    """The name and version of the library."""
    return f"{_PACKAGE} {metadata.version(_PACKAGE)}"


def epsilon_of(multipliers: Iterable[float], delta: float) -> float:
    """Epsilon of several Gaussian mechanisms on the same data, exactly (Balle and Wang 2018, Thm. 8).

    k releases with multipliers z_i are one with z, 1/z^2 = sum 1/z_i^2.

    Args:
        multipliers: of the releases; 0: without noise.
        delta: the other part of the promise.
    """
    found = list(multipliers)
    if not all(found):
        return math.inf
    precision = sum(1 / multiplier**2 for multiplier in found)
    return float(library().get_epsilon_gaussian(1 / math.sqrt(precision), delta)) if precision else 0.0


def multiplier_for(epsilon: float, delta: float, releases: int) -> float:
    """The multiplier of each of `releases` Gaussian mechanisms on the same data that keep to (epsilon, delta)."""
    return float(library().get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)


def epsilon_of_sampled(rounds: Iterable[Sampled], delta: float) -> float:
    """Epsilon against whoever does not see which clients took part, by Renyi's divergences.

    Each round draws its clients without replacement (Wang, Balle and Kasiviswanathan 2019); an upper bound.
    """
    rounds = Counter(rounds)
    if any(not multiplier for _, _, multiplier in rounds):
        return math.inf
    dp = library()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for (clients, present, multiplier), count in rounds.items():
        event = dp.GaussianDpEvent(multiplier)
        if present < clients:
            event = dp.SampledWithoutReplacementDpEvent(clients, present, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def multiplier_for_sampled(epsilon: float, delta: float, clients: int, present: int, rounds: int) -> float:
    """The multiplier of the sum of `present` of `clients` in each of `rounds` rounds that keeps to (epsilon, delta)."""

    def missing(multiplier: float) -> float:
        return epsilon_of_sampled([(clients, present, multiplier)] * rounds, delta)

    return _least(missing, epsilon)


def _least(of: Callable[[float], float], target: float) -> float:
    """The least x, to a thousandth, with of(x) <= target, of a function that falls."""
    low, high = 1e-3, 1.0
    while of(high) > target:
        low, high = high, 2 * high
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if of(middle) <= target else (middle, high)
    return high
