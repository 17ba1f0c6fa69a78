"""What a client minimises, and how it steps."""

from __future__ import annotations

import torch

from fcl_bench.training.heads import Heads
from fcl_bench.training.network import Network


class Objective:
    """What a client minimises and how; a method overrides what it does differently.

    Args:
        heads: the network's; None: logits are columns, and all compete.
        over: whose scores compete in the loss: see `Heads.competition`.
        rest: whether rows of classes that are not in the task stay as they are, in heads that train for others.
    """

    def __init__(self, heads: Heads | None = None, over: str = "seen", rest: bool = False) -> None:
        self._logits, self._position = (None, None) if heads is None else heads.competition(over)
        self._resting = {head: heads.resting_rows(head) for head in heads.reused} if heads and rest else {}

    def loss(self, network: Network, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of `labels` (b,) under the scores of standardised `images` (b, 3, size, size)."""
        scores = network(images)
        if self._logits is not None and self._position is not None:
            scores = scores[:, self._logits.to(scores.device)]
            labels = self._position.to(labels.device)[labels]
        return torch.nn.functional.cross_entropy(scores, labels)

    def direction(self, network: Network) -> None:
        """Change, in place, the gradients, weight decay included, before momentum and step."""
        for head, rows in self._resting.items():
            for parameter in network.heads[head].parameters():
                if parameter.grad is not None:
                    parameter.grad[rows] = 0

    def finish(self, network: Network) -> None:
        """After the last step of a round."""
