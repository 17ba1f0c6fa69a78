"""What clients of LANDER minimise: their features in balls around anchors, and a teacher on synthetic images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy, mse_loss

from fcl_bench.methods.data_free.anchors import MappedNetwork, outside
from fcl_bench.methods.data_free.generators.replay import ImagePool
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: KD_2.
_TEMPERATURE = 2.0


def factors(seen: int, known: int) -> tuple[float, float]:
    """(1 + 1/a) / b and a b, the factors of `cur` and `pre` if `known` of `seen` classes are old."""
    a, b = math.log2(seen / 2 + 1), math.sqrt(known / seen)
    return (1 + 1 / a) / b, a * b


class Bounded(Objective):
    """The client's loss; it also adds up its values.

    Args:
        heads, over, rest: see `Objective`.
        pull, radius: ltc and r.
        anchors: (C, d_e) of all columns; None: ltc is 0.
        current: the factor of the task's own loss; 1 in the first task.
    """

    def __init__(
        self,
        heads: Heads,
        over: str,
        rest: bool,
        pull: float,
        radius: float,
        anchors: torch.Tensor | None,
        current: float,
    ) -> None:
        super().__init__(heads, over, rest)
        self._pull, self._radius, self._anchors, self._current = pull, radius, anchors, current
        self._losses: list[torch.Tensor] = []

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = network.body(inputs)
        loss = self.score_loss(network.logits(features), labels, inputs)
        if self._anchors is not None:
            assert isinstance(network, MappedNetwork)
            pulled = outside(network.mapping(features), self._anchors[labels], self._radius)
            loss = loss + self._pull * pulled
        loss = self.with_replay(network, self._current * loss)
        self._losses.append(loss.detach())
        return loss

    def with_replay(self, network: Network, loss: torch.Tensor) -> torch.Tensor:
        """Adds the terms of synthetic samples; here there are none."""
        return loss

    def first_pass(self, passes: int) -> torch.Tensor:
        """(1,) the sum of the losses of the first pass; all `passes` have the same number of batches."""
        losses = self._losses[: len(self._losses) // passes]
        return torch.stack(losses).float().sum(dim=0, keepdim=True) if losses else torch.zeros(1)


class Replaying(Bounded):
    """The client's loss with a teacher.

    Args:
        base: arguments of `Bounded`.
        teacher: frozen.
        pool: synthetic images, `count` in each step.
        previous: the factor of their terms.
    """

    def __init__(self, *base: Any, teacher: MappedNetwork, pool: ImagePool, count: int, previous: float) -> None:
        super().__init__(*base)
        self._teacher, self._pool, self._count, self._previous = teacher, pool, count, previous

    def with_replay(self, network: Network, loss: torch.Tensor) -> torch.Tensor:
        assert isinstance(network, MappedNetwork)
        images, _ = self._pool.next(self._count)
        features = network.body(images)
        with torch.no_grad():
            known = self._teacher.body(images)
            wanted, mapped = (self._teacher.logits(known) / _TEMPERATURE).softmax(dim=1), self._teacher.mapping(known)
        scores = network.logits(features)[:, : wanted.shape[1]]
        distilled = cross_entropy(scores / _TEMPERATURE, wanted)
        return loss + self._previous * (distilled + mse_loss(network.mapping(features), mapped))
