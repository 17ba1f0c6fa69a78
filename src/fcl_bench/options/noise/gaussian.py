"""The Gaussian mechanism on clipped statistics or model updates; dp-accounting counts its guarantee.

Multipliers are noise over the replace-one sensitivity.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType
from typing import Any, ClassVar, cast

import torch

from fcl_bench.config import knob
from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.ledger import Ledger
from fcl_bench.engine.reports import Guarantee
from fcl_bench.errors import UserError, installing
from fcl_bench.options.noise.mechanism import DPMechanism, NoisyStatistics, NoisyUpdates, deviations, simulated
from fcl_bench.protocol.context import HALF, Context
from fcl_bench.protocol.fields import MEAN, SQUARE, Uploads
from fcl_bench.protocol.method import Method

log = logging.getLogger(__name__)

#: What is protected.
SAMPLE, CLIENT = "sample", "client"


@dataclass
class Gaussian:
    """Each client clips what it sends and adds Gaussian noise, so that its uploads are (epsilon, delta)-private.

    Neighbours differ in one sample of one client, or (unit=client) in all that one client holds; how many samples there
    are is public.
    """

    name: ClassVar[str] = "gaussian"
    noisy: ClassVar[bool] = True

    epsilon: float | None = knob(None, above=0)
    multiplier: float | None = knob(None, least=0)
    delta: float = knob(1e-5, above=0, below=1)
    clip: float = knob(1.0, above=0)
    unit: str = knob(SAMPLE, choices=(SAMPLE, CLIENT))
    share_of: int | None = knob(None, least=1)
    ridge: float = knob(1.0, least=0)

    def check(self, method: Method, context: Context) -> None:
        """Raise a `UserError` for what the mechanism does not cover, before any work is done."""
        if (self.epsilon is None) == (self.multiplier is None):
            both = f"noise.epsilon={self.epsilon} and noise.multiplier={self.multiplier}"
            which = "neither noise.epsilon nor noise.multiplier is" if self.epsilon is None else f"both {both} are"
            raise UserError(
                f"noise=gaussian: {which} given, and each follows from the other",
                "noise.epsilon=8, or noise.multiplier=1",
            )
        if self.multiplier != 0:
            library()
        uploads = Uploads.of(method, context)
        if not uploads.one_sample() and not uploads.only_models:
            fields = [pair for schema in uploads.declared.values() for pair in schema.items()]
            lacking = [name for name, own in fields if not own.one_sample and own.combine != MEAN]
            why = f"{', '.join(lacking)} without one_sample" if lacking else f"stages {', '.join(uploads.declared)}"
            raise UserError(
                f"noise=gaussian: nobody has bounded what one sample changes of method={method.name}'s uploads ({why})",
                "noise=none, or one of the methods and knobs that docs/explanation/noise.md lists, such as method=stsa",
            )
        right = SAMPLE if uploads.one_sample() else CLIENT
        if self.unit != right:
            what = "statistics of samples" if right == SAMPLE else "model updates"
            raise UserError(f"noise.unit={self.unit}: method={method.name} sends {what}", f"noise.unit={right}")
        wire = context.wire
        if wire.gram == "packed" and wire.dtype in HALF:
            raise UserError(
                f"wire.dtype={wire} wire.gram=packed: its scales are roots of a diagonal that noise may make negative",
                "wire.gram=full, or wire.dtype=float32",
            )
        if self.unit == CLIENT:
            self._check_network(method, context)
        if self.share_of is not None:
            self._check_share(method, context)

    def _check_network(self, method: Any, context: Context) -> None:
        network = method.build_network(context)
        statistics = [name for name, _ in network.named_buffers() if name.endswith(("running_mean", "running_var"))]
        if statistics:
            raise UserError(
                f"noise.unit=client: {statistics[0]} is a statistic of batch norm, which can't share the weights' clip",
                "a network without batch norm, such as a vision transformer, or method.trains=features",
            )

    def _check_share(self, method: Any, context: Context) -> None:
        key = f"noise.share_of={self.share_of}"
        if not context.sums:
            raise UserError(
                f"{key}: the server would see every upload, and each has only a share of the noise", "secure=sums"
            )
        if self.unit == CLIENT and method.training.weighting == "samples":
            weighting = f"{method.training_key}.weighting"
            raise UserError(
                f"{weighting}=samples: with {key} a client with many samples moves a sum by more than its noise is for",
                f"{weighting}=uniform, or noise.share_of=null",
            )

    def least_deviation(self, method: Method, context: Context, tasks: int) -> float:
        """Return the standard deviation of the least noisy numbers that a client sends."""
        if context.release is not None:
            return min(context.release.deviation.values()) / (math.sqrt(2) if context.release.of(SQUARE) else 1)
        return self._deviation_of_updates(method, tasks)

    def release(self, method: Method, context: Context) -> DPMechanism | None:
        """Return what both halves of a method that sends statistics know; None for another method."""
        summands = Uploads.of(method, context).one_sample()
        if not summands:
            return None
        noise = self._multiplier(method) / math.sqrt(self.share_of or 1)
        deviation = deviations(summands, self.clip, noise)
        return DPMechanism(self.clip, summands, deviation, self.ridge, self.share_of is not None)

    def middleware(
        self, method: Method, context: Context, tasks: int, key: bytes | None = None, samples: int = 0
    ) -> Sequence[Middleware]:
        """Return what uploads pass through before the wire codec.

        Args:
            tasks: T.
            key: of a real site in this run; None: clients are simulated, and their noise follows from the run's seed.
            samples: the most that such a site has of a task.
        """
        source = simulated(context.seed)
        if key is not None:
            from fcl_bench.options.noise.secret import secret

            if context.dtype != torch.float64:
                raise UserError("noise=gaussian at sites: dtype=float32 rounds too much to hide it", "dtype=float64")
            source = secret(key, self._multiplier(method, tasks), samples if self.unit == SAMPLE else 0)
        if context.release is not None:
            return [NoisyStatistics(source, context.release)]
        weighted = context.sums and cast(Any, method).training.weighting == "samples"
        return [NoisyUpdates(source, self.clip, self._deviation_of_updates(method, tasks), weighted)]

    def _deviation_of_updates(self, method: Method, tasks: int) -> float:
        # Any client may stand in another's place: 2 C apart at most.
        return self._multiplier(method, tasks) * 2 * self.clip / math.sqrt(self.share_of or 1)

    def _multiplier(self, method: Any, tasks: int = 1) -> float:
        """Return the multiplier of one upload: a task's statistics, or the model of one of all rounds there may be."""
        if self.multiplier is not None:
            return self.multiplier
        assert self.epsilon is not None
        releases = 1 if self.unit == SAMPLE else tasks * method.training.rounds
        return multiplier_for(self.epsilon, self.delta, releases)

    def guarantee(
        self, method: Method, context: Context, tasks: int, ledger: Ledger, at_sites: bool = False
    ) -> Guarantee:
        """Return the guarantee of a run's uploads, from how many of them each client has sent.

        Args:
            at_sites: whether each client drew its noise from a secret of its own.
        """
        multiplier = self._multiplier(method, tasks)
        #: Of each client, or of each client's samples of a task: the multipliers of what was sent of them.
        sent: dict[tuple[int, ...], list[float]] = defaultdict(list)
        rows = ledger.rows
        # A client that is lost after its keys (secure=sums) has sent bytes, but no upload; late ones stay masked.
        came = (rows["up_bytes"] > 0) & (rows["lost"] == 0) & (rows["late"] <= int(not context.sums))
        read = rows[["task", "round", "client"]][came].tolist()
        together = Counter((task, round_) for task, round_, _ in read)
        for task, round_, client in read:
            share = 1 if self.share_of is None else together[task, round_] / self.share_of
            sent[(client,) if self.unit == CLIENT else (task, client)].append(multiplier * math.sqrt(share))
        released = set(map(tuple, sent.values()))
        epsilon = max((epsilon_of(found, self.delta) for found in released), default=0.0)
        if self.epsilon is not None and epsilon > 1.001 * self.epsilon:
            log.warning(
                "noise.epsilon=%g is not kept to: some sums are of fewer uploads than noise.share_of=%s; epsilon is"
                " %.4g",
                self.epsilon,
                self.share_of,
                epsilon,
            )
        return {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": self.delta,
            "unit": self.unit,
            "clip": self.clip,
            "multiplier": multiplier,
            "releases": max(map(len, sent.values()), default=0),
            "of_sums": self.share_of is not None,
            "accountant": f"{_PACKAGE} {metadata.version(_PACKAGE)}" if multiplier else None,
            "generator": (_AT_SITES if at_sites else _SIMULATED) if multiplier else None,
            "against_server": bool(multiplier) and at_sites,
        }


_PACKAGE = "dp-accounting"
#: What draws the noise (`Guarantee.generator`).
_AT_SITES = "discrete Gaussian of AES-256-CTR, from each site's secret"
_SIMULATED = "simulated: torch.Generator, from the run's seed"


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


def epsilon_of(multipliers: Iterable[float], delta: float) -> float:
    """Return epsilon of several Gaussian mechanisms on the same data, exactly (Balle and Wang 2018, Thm. 8).

    k releases with multipliers z_i are one with z, 1/z^2 = sum 1/z_i^2.

    Args:
        multipliers: of the releases; 0: without noise.
    """
    found = list(multipliers)
    if not all(found):
        return math.inf
    precision = sum(1 / multiplier**2 for multiplier in found)
    return float(library().get_epsilon_gaussian(1 / math.sqrt(precision), delta)) if precision else 0.0


def multiplier_for(epsilon: float, delta: float, releases: int) -> float:
    """Return the multiplier that makes `releases` Gaussian mechanisms on the same data (epsilon, delta)-private."""
    return float(library().get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)
