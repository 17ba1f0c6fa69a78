"""Gaussian noise on the clients' side, the last step before the wire codec."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fcl_bench.engine.codec import Middleware
from fcl_bench.options.noise.mechanism import DPMechanism
from fcl_bench.protocol.fields import COUNT, SQUARE
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed


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
