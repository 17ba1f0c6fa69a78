"""GLFC's loss (Dong et al., CVPR 2022): new and old classes are learnt at one pace, with an old model's targets.

q are a sample's logits, y its class, sigma the logistic function. The gradient in its own logit has the magnitude
g = |sigma(q)[y] - 1|, which is divided by its mean over the sample's group in the batch: the samples of classes that
the client learnt in earlier tasks, or the others. O are the old model's columns and q' its logits.

    w_i   = g_i / mean of g over i's group; 1 where the client has learnt no class yet
    L_cur = mean_{i,c} w_i BCE(sigma(q_ic), [c = y_i])
    L_old = mean_{i,c} BCE(sigma(q_ic), t_ic),   t_ic = sigma(q'_ic) for c in O, else [c = y_i]
    L     = (L_cur + L_old) / 2, or L_cur where there is no old model
"""

from __future__ import annotations

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from fcl_bench.linalg.gram import class_sums
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: Added inside the logarithm of the entropy, as published.
_EPSILON = 1e-5


def magnitudes(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(b,) g of the logits (b, C) and labels (b,), without a gradient."""
    # 1 - sigma(q) = sigma(-q), which does not round to 0 where sigma(q) rounds to 1.
    return scores.detach().gather(1, labels.unsqueeze(1)).squeeze(1).neg().sigmoid()


def group_weights(magnitude: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """(b,) each magnitude divided by the mean over its group.

    Args:
        magnitude: (b,) g.
        old: (b,) bool, which of the two groups each sample is in.
    """
    group = old.long()
    sums, sizes = class_sums(torch.stack([magnitude, torch.ones_like(magnitude)], dim=1), group, 2)
    # A group with nothing left to learn has no mean to divide by.
    factor = torch.where(sums > 0, sizes / sums, 0)
    return magnitude * factor[group]


def entropy(scores: torch.Tensor) -> torch.Tensor:
    """() H = mean_x sum_c -p_c log(p_c + 1e-5), p the softmax of logits (n, C), in float64."""
    p = scores.double().softmax(dim=1)
    return -(p * (p + _EPSILON).log()).sum(dim=1).mean()


class Compensated(Objective):
    """The loss of the equations above; LGA changes `weights` and `combined`.

    Args:
        heads, rest: see `Objective`. All columns count.
        learnt: (C,) bool, the columns that the client learnt in earlier tasks.
        old: the old model; its logits are the first ones of the model that learns. None: there is none.
    """

    def __init__(self, heads: Heads, rest: bool, learnt: torch.Tensor, old: Network | None) -> None:
        super().__init__(heads, "seen", rest)
        self._learnt, self._old = (learnt if bool(learnt.any()) else None), old

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        targets = one_hot(labels, scores.shape[1]).to(scores.dtype)
        weights = self.weights(scores, labels)
        current = binary_cross_entropy_with_logits(scores, targets, reduction="none")
        weighted = current.mean() if weights is None else (weights.unsqueeze(1) * current).mean()
        if self._old is None:
            return weighted
        with torch.no_grad():
            wanted = self._old(inputs).to(scores.dtype).sigmoid()
        softened = targets.clone()
        softened[:, : wanted.shape[1]] = wanted
        distilled = binary_cross_entropy_with_logits(scores, softened, reduction="none")
        return self.combined(weighted, distilled, weights)

    def weights(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """(b,) w; None: all are 1."""
        return None if self._learnt is None else group_weights(magnitudes(scores, labels), self._learnt[labels])

    def combined(self, weighted: torch.Tensor, distilled: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """L of L_cur, the terms (b, C) of L_old, and w."""
        return (weighted + distilled.mean()) / 2
