"""LGA's weights of samples (Dong et al., TPAMI 2023): those that are learnt worst weigh most, task by task.

g_i = |sigma(q_i)[y_i] - 1|^(t / (t + 1)) in task t (|.| itself in the first), q_i the logits, y_i the label. A group is
the batch's samples that the client meets for the first time in this task, or those of the classes that it has learnt
and that first appeared in one earlier task.

    separate:    w_i = g_i / mean of g over i's group
    cumulative:  the same for new samples; for a learnt class of task j, sum_{s=j}^{t-1} g_i / mean of g over tasks <= s

and both are cut to [0.5, 5]. If the client has learnt no class yet, every weight is 1.
"""

from __future__ import annotations

import torch

#: How the groups of earlier tasks are made.
GROUPS = ("separate", "cumulative")
#: The limits of a weight.
LEAST, MOST = 0.5, 5.0


def tempered(magnitude: torch.Tensor, task: int) -> torch.Tensor:
    """(b,) g of task `task`, from 0, of the magnitudes |sigma(q)[y] - 1|."""
    return magnitude.pow(task / (task + 1)) if task else magnitude


def balanced_weights(
    magnitude: torch.Tensor, labels: torch.Tensor, first: torch.Tensor, learnt: torch.Tensor, task: int, groups: str
) -> torch.Tensor:
    """(b,) w of the equations above.

    Args:
        magnitude: (b,) g.
        labels: (b,) columns.
        first: (C,) int64, the task in which each column first appeared.
        learnt: (C,) bool, the columns that the client has learnt in earlier tasks.
        task: t.
        groups: one of `GROUPS`.
    """
    if not bool(learnt.any()):
        return torch.ones_like(magnitude)
    group = torch.where(learnt, first, task)[labels]
    each = torch.arange(task + 1, device=group.device).unsqueeze(1)
    member = group == each
    if groups == "cumulative":
        member[:task] = group <= each[:task]
    member = member.to(magnitude.dtype)
    sums = member @ magnitude
    # A group without a sample, or without anything left to learn, has no mean to divide by.
    factor = torch.where(sums > 0, member.sum(dim=1) / sums, 0)
    return (magnitude * (factor @ member)).clamp(LEAST, MOST)
