"""The guarantee of noise, by Google's dp-accounting. Multipliers are noise over the replace-one sensitivity."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr
from importlib import import_module, metadata
from types import ModuleType

from fcl_bench.errors import UserError, installing

_PACKAGE = "dp-accounting"


def library() -> ModuleType:
    """Return the module dp_accounting. Raises a `UserError` that says how to install it."""
    try:
        # It brings absl, whose log handler keeps what is stderr now, and closes it when somebody sets logging up anew
        # (submitit does), unless it is the process's own.
        with redirect_stderr(sys.__stderr__):
            return import_module("dp_accounting")
    except ModuleNotFoundError as error:
        raise UserError(
            f"noise=gaussian: {error.name} is not installed, and it is what counts epsilon",
            f"noise=none, or {installing('privacy')}",
        ) from error


def version() -> str:
    """Return the name and version of the library."""
    return f"{_PACKAGE} {metadata.version(_PACKAGE)}"


def epsilon_of(multipliers: Iterable[float], delta: float) -> float:
    """Return epsilon of several Gaussian mechanisms on the same data, exactly (Balle and Wang 2018, Thm. 8).

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
    """Return the multiplier that makes `releases` Gaussian mechanisms on the same data (epsilon, delta)-private."""
    return float(library().get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)
