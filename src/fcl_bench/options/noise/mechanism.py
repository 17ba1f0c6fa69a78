"""Noise in uploads: how far one sample moves them, and the middleware at the clients that adds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from fcl_bench.engine.codec import Middleware
from fcl_bench.linalg.structure import NOISE_BOUND
from fcl_bench.protocol.fields import COLUMN, COUNT, SQUARE, Field, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed

#: The most that |h h' - g g'|^2 + |h - g|^2 can be for two samples of one class, by which of the two terms there are.
_SAME_CLASS = {frozenset(): 0.0, frozenset({SQUARE}): 2.0, frozenset({COLUMN}): 4.0, frozenset({SQUARE, COLUMN}): 4.5}


@dataclass(frozen=True)
class DPMechanism:
    """Statistics of clipped samples, and the Gaussian noise that each client adds to its own.

    Attributes:
        clip: upper bound of |h|.
        summands: what each field sums.
        deviation: standard deviation of the noise in each number of a field; for a "square" it holds on the diagonal,
            and off the diagonal the deviation is 1/sqrt(2) of it.
        ridge: how many times the noise of a Gram matrix is added to its eigenvalues before a system is solved with it.
        shared: whether `deviation` is that of one client's share of the noise, so that only sums of uploads have all
            of the noise.
    """

    clip: float
    summands: Mapping[str, str]
    deviation: Mapping[str, float]
    ridge: float = 1.0
    shared: bool = False

    def edge(self, rows: int, uploads: int) -> float:
        """The spectral norm of the noise in a sum of Gram matrices (rows, rows) of `uploads` clients; 0: none is sent.

        By Wigner's semicircle law it is 2 sqrt(rows) times the standard deviation off the diagonal.
        """
        return math.sqrt(2 * rows * uploads) * self.of(SQUARE)

    def of(self, kind: str) -> float:
        """The deviation of the field of this kind; 0 if there is no such field."""
        return next((self.deviation[name] for name, own in self.summands.items() if own == kind), 0.0)

    def counted(self, total: Message) -> Message:
        """A sum of uploads whose counts are whole numbers again.

        A client that has a share of the noise doesn't round its own counts: that would round its share away.
        """
        counts = {name for name, kind in self.summands.items() if kind == COUNT and total[name].is_floating_point()}
        return total.with_tensors(
            {name: t.round().to(torch.int64) if name in counts else t for name, t in total.items()}
        )

    def loosened(self, expected: Schema, uploads: int = 1) -> Schema:
        """The expectation of an upload of clipped samples with noise: it exceeds the ranges a little, and has no form.

        Args:
            uploads: how many clients' uploads, each with its own noise, are in the sum.
        """
        return {name: self._loosened(name, wanted, uploads) for name, wanted in expected.items()}

    def _loosened(self, name: str, wanted: Field, uploads: int) -> Field:
        if self.summands.get(name) in (SQUARE, COLUMN):
            wanted = replace(wanted, longest=self.clip, shift=uploads * wanted.shift)
        deviation = self.deviation.get(name, 0.0) * math.sqrt(uploads)
        if deviation == 0:
            return wanted
        room = NOISE_BOUND * deviation + (0.5 * uploads if self.summands[name] == COUNT else 0.0)
        least = None if wanted.least is None else wanted.least - room
        form = "noisy gram" if wanted.form == "gram" else ""
        return replace(
            wanted,
            least=least,
            form=form,
            noise=deviation,
            per_sample=None,
            of="",
            by="",
            zero_without="",
        )


def sensitivity(summands: Mapping[str, str]) -> tuple[float, float]:
    """Delta and v: the L2 sensitivity of (G, S, v n) for samples with |h| <= 1, and the weight v of the counts.

    The replaced sample may have any features and any class. With the same class the counts stay as they are; with
    another one h and g share no column, and the squares add up: 2 (1 + 1 + v^2) with all three fields. v is the largest
    with which the second case is no worse than the first, so that counts cost nothing; 1 where that would be 0.

    Args:
        summands: the kind of each field, each kind at most once.
    """
    kinds = list(summands.values())
    if len(set(kinds)) < len(kinds) or not kinds:
        raise ValueError(f"no sensitivity of {dict(summands)}")
    moments = frozenset(kinds) - {COUNT}
    same = _SAME_CLASS[moments]
    weight = 0.0
    if COUNT in kinds:
        free = same / 2 - len(moments)
        weight = math.sqrt(free) if free > 0 else 1.0
    return math.sqrt(max(same, 2 * (len(moments) + weight**2))), weight


def deviations(summands: Mapping[str, str], clip: float, multiplier: float) -> dict[str, float]:
    """The standard deviation of the noise of each field, in its own unit.

    Args:
        summands: the kind of each field.
        clip: upper bound of |h|.
        multiplier: noise over sensitivity.
    """
    delta, weight = sensitivity(summands)
    of_kind = {SQUARE: clip**2, COLUMN: clip, COUNT: 1 / weight if weight else 0.0}
    return {name: multiplier * delta * of_kind[kind] for name, kind in summands.items()}


class SimulatedNoise:
    """Floating-point noise of one upload, from the run's seed: whoever knows that can subtract it."""

    def __init__(self, draw: torch.Generator) -> None:
        self._draw = draw

    def on(
        self, values: torch.Tensor, deviation: float, symmetric: bool = False, start: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `values` in float64 with noise.

        Args:
            deviation: its standard deviation in each number.
            symmetric: whether `values` (M, M) is a symmetric matrix: beside the diagonal, where each number counts
                twice in the norm, the noise has half the variance.
            start: what everybody knows, to be added; None: nothing.
        """
        noise = deviation * torch.randn(values.shape, generator=self._draw, dtype=torch.float64)
        if symmetric:
            beside = noise.triu(1) / math.sqrt(2)
            noise = beside + beside.T + torch.diag(noise.diagonal())
        values = values.double() if start is None else start + values
        return values + noise.to(values.device)


#: The noise of an upload of a client that answers this broadcast (None: it needs none). One that is sent again after an
#: interruption has the same noise, and reveals nothing more.
Source = Callable[[Message, int, Message | None], SimulatedNoise]


def simulated(seed: int) -> Source:
    """Return the source of clients that one process plays."""

    def noise(upload: Message, client: int, broadcast: Message | None) -> SimulatedNoise:
        drawn_by = derived_seed(seed, "noise", upload.task, upload.round, client)
        return SimulatedNoise(torch.Generator().manual_seed(drawn_by))

    return noise


class _Noisy(Middleware):
    """A step that adds noise to what a client sends."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._broadcast: dict[int, Message] = {}

    def receive(self, message: Message, client: int) -> Message:
        # One at a time: a client answers the broadcast that it had last.
        self._broadcast = {client: message}
        return message


class NoisyStatistics(_Noisy):
    """Adds noise to every field of an upload of statistics. The samples were clipped when they were mapped to H.

    Counts are rounded afterwards, and may be negative; where each client has a share of the noise the server rounds
    their sum (`DPMechanism.counted`).
    """

    def __init__(self, source: Source, release: DPMechanism) -> None:
        super().__init__(source)
        self._release = release

    def send(self, message: Message, client: int | None) -> Message:
        assert client is not None
        noise = self._source(message, client, self._broadcast.pop(client, None))
        return message.with_tensors({name: self._noisy(name, tensor, noise) for name, tensor in message.items()})

    def _noisy(self, name: str, tensor: torch.Tensor, noise: SimulatedNoise) -> torch.Tensor:
        kind, deviation = self._release.summands.get(name), self._release.deviation.get(name)
        if kind is None or deviation is None:
            raise ValueError(f"nobody has bounded what a sample adds to {name}, so it does not leave its client")
        noisy = noise.on(tensor, deviation, symmetric=kind == SQUARE)
        if kind != COUNT:
            return noisy.to(tensor.dtype)
        if self._release.shared:
            return noisy
        limits = torch.iinfo(tensor.dtype)
        return noisy.round().clamp(limits.min, limits.max).to(tensor.dtype)


class NoisyUpdates(_Noisy):
    """Clips what training changed of the broadcast model, over all its tensors together, and adds noise to it.

    Args:
        clip: C, the largest L2 norm of an update.
        weighted: whether models come times their number of samples; these weights are public.
    """

    def __init__(self, source: Source, clip: float, deviation: float, weighted: bool = False) -> None:
        super().__init__(source)
        self._clip, self._deviation, self._weighted = clip, deviation, weighted

    def send(self, message: Message, client: int | None) -> Message:
        assert client is not None
        start = self._broadcast.pop(client)
        if absent := [name for name in message if name not in start]:
            raise ValueError(f"{absent[0]} is no part of the broadcast model, so it does not leave its client")
        weight = message.samples if self._weighted and message.samples else 1
        changes = {name: own.double() / weight - start[name].to(own.device).double() for name, own in message.items()}
        length = math.sqrt(sum(float(change.square().sum()) for change in changes.values()))
        share = min(1.0, self._clip / length) if length else 1.0
        noise = self._source(message, client, start)
        noisy = {}
        for name, change in changes.items():
            moved = noise.on(share * change, self._deviation, start=start[name].to(change))
            noisy[name] = (weight * moved).to(message[name].dtype)
        return message.with_tensors(noisy)
