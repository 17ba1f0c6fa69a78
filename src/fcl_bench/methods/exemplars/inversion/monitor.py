"""How a server without data chooses a model: by its accuracy on images that it reconstructed (GLFC's proxy server)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fcl_bench.data.images.batches import Augmentation
from fcl_bench.training.optimisers import with_prefix

#: Images at a time.
_BATCH = 64
#: When the performance to beat is forgotten: as each task begins (the paper), as the second begins (LGA's code), or
#: never (GLFC's code).
RESETS = ("task", "once", "never")


def monitor_accuracy(
    images: torch.Tensor,
    labels: torch.Tensor,
    scores: Callable[[torch.Tensor], torch.Tensor],
    augment: Augmentation,
    seed: int,
) -> float:
    """The share of the augmented images that a model classifies rightly; all images count.

    Args:
        images: (n, 3, h, w) uint8, at least one.
        labels: (n,) columns.
        scores: (b, 3, h, w) uint8 to (b, C) of all columns.
        augment: as in training.
        seed: of what it draws.
    """
    generator, right = torch.Generator().manual_seed(seed), 0
    with torch.inference_mode():
        for batch, wanted in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
            right += int((scores(augment(batch, generator)).argmax(dim=1) == wanted).sum())
    return right / len(labels)


class BestModels:
    """The best model of the last task (GLFC's b1) and that of the task at hand (b2), by the monitor's accuracy.

    Args:
        resets: when `performance` falls back to 0: see `RESETS`.
        shifts: what makes the best model of the task at hand that of the last: task (a new task begins), gradients
            (as published: gradients come in, in whatever round).

    Attributes:
        last: b1, tensors by name; None: there is none.
        best: b2.
        performance: of b2, what a model has to reach to replace it.
        last_version, best_version: their numbers among all models that were best, from 1; 0: none. A version never
            changes, so a client needs it once.
    """

    def __init__(self, resets: str = "task", shifts: str = "task") -> None:
        self._resets, self._shifts = resets, shifts
        self.last: dict[str, torch.Tensor] | None = None
        self.best: dict[str, torch.Tensor] | None = None
        self.performance = 0.0
        self.last_version = self.best_version = 0
        self._versions = 0

    def begin(self, task: int) -> None:
        """A task begins, with this index."""
        if self._shifts == "task":
            self._shift()
        if self._resets == "task" or (self._resets == "once" and task == 1):
            self.performance = 0.0
        if self._resets == self._shifts == "task":
            # A task without gradients has no best model, and the one of the task before is not its.
            self.best, self.best_version = None, 0

    def gradients_came(self) -> None:
        """A round brought gradients, and so the monitor has other images."""
        if self._shifts == "gradients":
            self._shift()

    def _shift(self) -> None:
        self.last, self.last_version = self.best, self.best_version

    def offer(self, model: Mapping[str, torch.Tensor], performance: float) -> bool:
        """Whether the model with this `performance` becomes the best; if so, it is copied."""
        if performance < self.performance:
            return False
        self.performance = performance
        self.best = {name: value.detach().clone() for name, value in model.items()}
        self._versions += 1
        self.best_version = self._versions
        return True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`last.<name>`, `best.<name>`, `performance`, and `versions` of last, best and newest."""
        last = {f"last.{name}": value for name, value in (self.last or {}).items()}
        best = {f"best.{name}": value for name, value in (self.best or {}).items()}
        performance = torch.tensor(self.performance, dtype=torch.float64)
        versions = torch.tensor([self.last_version, self.best_version, self._versions])
        return {**last, **best, "performance": performance, "versions": versions}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""
        self.last, self.best = with_prefix(state, "last.") or None, with_prefix(state, "best.") or None
        self.performance = float(state["performance"])
        self.last_version, self.best_version, self._versions = state["versions"].tolist()
