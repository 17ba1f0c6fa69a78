"""Gradient steps and samples that passed a network, counted where all of them come by, whoever asked for them.

Every optimiser of torch, and the body of every `training.network.Network`, counts by itself. Code that steps or
differentiates without these says so (`count`). What a block of code did is the difference of two looks at `TALLY`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

#: Steps of optimisers, where problems that step side by side count each; samples that passed forward and backward; and
#: samples that passed forward alone.
COUNTED = STEPS, TRAINED, FORWARD = "gradient_steps", "samples_trained", "samples_forward"


class _Tally(threading.local):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


#: Its `counts` are of all that this thread has computed.
TALLY = _Tally()


def count(steps: int = 0, trained: int = 0, forward: int = 0) -> None:
    """Add what no optimiser of torch's and no network's body counts."""
    TALLY.counts.update({STEPS: steps, TRAINED: trained, FORWARD: forward})


@contextmanager
def uncounted() -> Iterator[None]:
    """A block that computes what is no method's work, or is counted otherwise."""
    before = TALLY.counts.copy()
    try:
        yield
    finally:
        TALLY.counts = before


def _count_step(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    if not isinstance(optimiser, torch.optim.LBFGS):  # whose closure counts the many that it makes
        TALLY.counts[STEPS] += 1


register_optimizer_step_post_hook(_count_step)
