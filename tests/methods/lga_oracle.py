"""LGA written down once more, sample by sample in plain Python and NumPy in float64, from the equations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tests.methods import glfc_oracle


def sigma(q: np.ndarray | float) -> np.ndarray | float:
    return 1 / (1 + np.exp(-np.asarray(q)))


def magnitudes(q: np.ndarray, y: Sequence[int], task: int) -> list[float]:
    found = [abs(float(sigma(q[i][y[i]])) - 1) for i in range(len(y))]
    return found if task == 0 else [g ** (task / (task + 1)) for g in found]


def weights(
    g: Sequence[float], y: Sequence[int], first: Sequence[int], learnt: Collection[int], task: int, groups: str
) -> list[float]:
    """As the public code has it: a mask for the new classes, then one for each earlier task, their weights summed."""
    if not learnt:
        return [1.0] * len(y)

    def share(mask: list[bool]) -> list[float]:
        inside = [g[i] for i in range(len(y)) if mask[i]]
        if not inside:
            return [0.0] * len(y)
        mean = sum(inside) / len(inside)
        return [g[i] / mean if mask[i] else 0.0 for i in range(len(y))]

    found = share([c not in learnt for c in y])
    marked = [False] * len(y)
    for s in range(task):
        of_s = [c in learnt and first[c] == s for c in y]
        # The published loop never unmarks the samples of earlier tasks.
        marked = [a or b for a, b in zip(marked, of_s, strict=True)]
        mask = marked if groups == "cumulative" else of_s
        found = [a + b for a, b in zip(found, share(mask), strict=True)]
    return [min(max(w, 0.5), 5.0) for w in found]


def bce(q: float, target: float) -> float:
    p = float(sigma(q))
    return -target * np.log(p) - (1 - target) * np.log(1 - p)


def loss(
    q: np.ndarray,
    y: Sequence[int],
    old: np.ndarray | None,
    first: Sequence[int],
    learnt: Collection[int],
    task: int,
    groups: str = "separate",
    lam: float = 1.0,
) -> float:
    """lam (L_cur + L_old), or L_cur where there is no old model; `old` (b, |old|) are its logits."""
    w = weights(magnitudes(q, y, task), y, first, learnt, task, groups)
    rows, columns = q.shape
    hard = np.eye(columns)[list(y)]
    current = sum(w[i] * bce(q[i, c], hard[i, c]) for i in range(rows) for c in range(columns)) / q.size
    if old is None:
        return current
    soft = hard.copy()
    soft[:, : old.shape[1]] = sigma(old)
    distilled = sum(w[i] * bce(q[i, c], soft[i, c]) for i in range(rows) for c in range(columns)) / q.size
    return lam * (current + distilled)


def gradient(
    q: np.ndarray,
    y: Sequence[int],
    old: np.ndarray | None,
    first: Sequence[int],
    learnt: Collection[int],
    task: int,
    groups: str,
    lam: float,
) -> np.ndarray:
    """d loss / d q, w constant: (w_i / (b C)) (sigma - y), or (lam w_i / (b C)) (sigma - y + sigma - t)."""
    w = weights(magnitudes(q, y, task), y, first, learnt, task, groups)
    hard = np.eye(q.shape[1])[list(y)]
    found = sigma(q) - hard
    if old is not None:
        soft = hard.copy()
        soft[:, : old.shape[1]] = sigma(old)
        found = lam * (found + sigma(q) - soft)
    return np.array(w)[:, None] * found / q.size


@dataclass
class Plain(glfc_oracle.Plain):
    """GLFC's training on features, with the gradient of LGA."""

    groups: str = "separate"
    lam: float = 1.0

    def learn(self, tasks: list, heads: list[np.ndarray]) -> list[np.ndarray]:
        self.first = [task for task, head in enumerate(heads) for _ in head]
        return super().learn(tasks, heads)

    def slope(self, q: np.ndarray, y: np.ndarray, learnt: Collection[int], old: np.ndarray | None) -> np.ndarray:
        first = self.first[: q.shape[1]]
        return gradient(q, y.tolist(), old, first, learnt, first[-1], self.groups, self.lam)


def radius(features: Sequence[np.ndarray]) -> float:
    """Of everyone's features (n, d) of each class: the root of the mean over classes of trace(cov) / d."""
    found = [np.trace(np.atleast_2d(np.cov(phi.T))) / phi.shape[1] for phi in features if len(phi) > 1]
    return float(np.sqrt(np.mean(found)))


def best_models(accuracies: Sequence[Sequence[float]], proxy_init: int) -> list[tuple[str | None, str | None]]:
    """The best models of the last task and of the task at hand after every round, called "task.round".

    Args:
        accuracies: [task][round] of the averaged model on the monitor set.
        proxy_init: the first rounds of a task that count as 0.
    """
    b2, found = None, []
    for task, rounds in enumerate(accuracies):
        b1, best = b2, 0.0
        for round_, accuracy in enumerate(rounds):
            counted = 0.0 if round_ < proxy_init else accuracy
            if counted >= best:
                best, b2 = counted, f"{task}.{round_}"
            found.append((b1, b2))
    return found
