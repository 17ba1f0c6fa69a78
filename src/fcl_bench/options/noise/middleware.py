"""Gaussian noise on the clients' side, the last step before the wire codec."""

from __future__ import annotations

import math

import torch

from fcl_bench.engine.codec import Middleware
from fcl_bench.files import content_hash
from fcl_bench.options.noise.mechanism import DPMechanism
from fcl_bench.protocol.fields import COUNT, SQUARE
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed


class NoisyStatistics(Middleware):
    """Adds noise to every field of an upload of statistics. The samples were clipped when they were mapped to H.

    A Gram matrix gets a symmetric matrix: independent entries on the diagonal, and beside it, where each number counts
    twice in the norm, with half the variance. Counts are rounded afterwards, and may be negative; where each client has
    a share of the noise the server rounds their sum (`DPMechanism.counted`).

    Args:
        seed: of the run. A real deployment must draw from a secure generator.
    """

    def __init__(self, seed: int, release: DPMechanism) -> None:
        self._seed, self._release = seed, release

    def send(self, message: Message, client: int | None) -> Message:
        draw = _generator(self._seed, message, client)
        return message.with_tensors({name: self._noisy(name, tensor, draw) for name, tensor in message.items()})

    def _noisy(self, name: str, tensor: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        kind, deviation = self._release.summands.get(name), self._release.deviation.get(name)
        if kind is None or deviation is None:
            raise ValueError(f"nobody has bounded what a sample adds to {name}, so it does not leave its client")
        noise = deviation * torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        if kind == SQUARE:
            beside = noise.triu(1) / math.sqrt(2)
            noise = beside + beside.T + torch.diag(noise.diagonal())
        noisy = tensor.double() + noise.to(tensor.device)
        if kind != COUNT:
            return noisy.to(tensor.dtype)
        if self._release.shared:
            return noisy
        limits = torch.iinfo(tensor.dtype)
        return noisy.round().clamp(limits.min, limits.max).to(tensor.dtype)


class NoisyUpdates(Middleware):
    """Clips what training changed of the broadcast model, over all its tensors together, and adds noise to it.

    Args:
        seed: of the run; see `NoisyStatistics`.
        clip: C, the largest L2 norm of an update.
        weighted: whether models come times their number of samples; these weights are public.
        by_start: whether the noise depends on the broadcast model, too. Else a round that is done again from another
            model has the same noise, and the difference of both uploads has none.
    """

    def __init__(
        self, seed: int, clip: float, deviation: float, weighted: bool = False, by_start: bool = False
    ) -> None:
        self._seed, self._clip, self._deviation, self._weighted = seed, clip, deviation, weighted
        self._by_start = by_start
        self._start: dict[int, Message] = {}

    def receive(self, message: Message, client: int) -> Message:
        # One at a time: a client answers the broadcast that it had last.
        self._start = {client: message}
        return message

    def send(self, message: Message, client: int | None) -> Message:
        assert client is not None
        start = self._start.pop(client)
        if absent := [name for name in message if name not in start]:
            raise ValueError(f"{absent[0]} is no part of the broadcast model, so it does not leave its client")
        weight = message.samples if self._weighted and message.samples else 1
        changes = {name: own.double() / weight - start[name].to(own.device).double() for name, own in message.items()}
        length = math.sqrt(sum(float(change.square().sum()) for change in changes.values()))
        share = min(1.0, self._clip / length) if length else 1.0
        draw = _generator(self._seed, message, client, *([_number(start)] if self._by_start else []))
        noisy = {}
        for name, change in changes.items():
            noise = self._deviation * torch.randn(change.shape, generator=draw, dtype=torch.float64)
            moved = start[name].to(change) + share * change + noise.to(change.device)
            noisy[name] = (weight * moved).to(message[name].dtype)
        return message.with_tensors(noisy)


def _number(message: Message) -> int:
    """Return a number of 128 bits that follows from all tensors."""
    digest = content_hash()
    for name, tensor in sorted(message.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little")


def _generator(seed: int, message: Message, client: int | None, *more: int) -> torch.Generator:
    """Return one stream per upload: one sent again after an interruption is the same, and reveals nothing more."""
    assert client is not None
    return torch.Generator().manual_seed(derived_seed(seed, "noise", message.task, message.round, client, *more))
