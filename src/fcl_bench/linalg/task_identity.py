"""Which task a sample belongs to, from the subspaces of the tasks' final-layer inputs (FedProTIP 4.4)."""

from __future__ import annotations

import torch

#: Products (sample, client, task, task) held at once.
_BLOCK = 2**23


def relevance(A: torch.Tensor, bases: list[torch.Tensor]) -> torch.Tensor:
    """omega (n, T) with omega[i, t] = ||U_t U_t' a_i||_2 (Eq. 10).

    Args:
        A: (n, d) final-layer inputs.
        bases: per task U_t (d, r_t) orthonormal; r_t may be 0.
    """
    # U_t is orthonormal, so the projection is as long as its coordinates.
    return torch.stack([torch.linalg.vector_norm(A @ U, dim=1) for U in bases], dim=1)


def route(omega: torch.Tensor, references: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The task (n,) that most clients find most similar (Eq. 11).

    Every client votes for the task whose reference, among those it has, has the largest cosine similarity with omega.
    Ties go to the task with the larger similarity summed over the clients that know it, then to the earlier task.

    Args:
        omega: (n, T) relevance of the samples.
        references: (K, T, T): client k's reference of task tau.
        known: (K, T) bool: whether it has one.
    """
    voters = known.any(dim=1)
    references, known = _unit(references[voters]), known[voters]
    size = max(1, _BLOCK // max(1, references.numel()))
    return torch.cat([_route(block, references, known) for block in omega.split(size)])


def _route(omega: torch.Tensor, references: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    tasks = known.shape[1]
    # No matrix product: its rounding depends on the column, and equal references must stay equal.
    similarity = (_unit(omega)[:, None, None, :] * references).sum(dim=3)
    votes = similarity.masked_fill(~known, -torch.inf).argmax(dim=2)
    counts = torch.nn.functional.one_hot(votes, tasks).sum(dim=1)
    total = (similarity * known).sum(dim=1)
    # The most votes; among those tied, the largest sum; argmax takes the first of what is still equal.
    leading = counts == counts.amax(dim=1, keepdim=True)
    return total.masked_fill(~leading, -torch.inf).argmax(dim=1)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """The vectors along the last axis at length 1; zero ones stay zero."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(length > 0, length, torch.ones_like(length))
