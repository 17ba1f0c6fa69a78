"""Pseudo-labels from class prototypes (FedRAN-SSL, Alg. 4)."""

from __future__ import annotations

import torch


def pseudo_labels(Z: torch.Tensor, labels: torch.Tensor, U: torch.Tensor, threshold: float) -> torch.Tensor:
    """The class of the most similar prototype of each unlabelled sample, if it is similar enough (Eq. 13-15).

    A prototype is the mean of a class's labelled features. A feature of zero norm has no direction: as a sample it is
    never accepted, as a prototype never chosen.

    Args:
        Z: (n, d) labelled backbone features.
        labels: (n,) their classes, any integers from 0.
        U: (m, d) unlabelled backbone features.
        threshold: tau, the least cosine similarity.

    Returns:
        (m,) int64, -1 where no label is accepted.
    """
    rejected = torch.full((len(U),), -1, dtype=torch.int64, device=U.device)
    if len(Z) == 0 or len(U) == 0:
        return rejected
    classes, members = labels.unique(return_inverse=True)
    sums = torch.nn.functional.one_hot(members, len(classes)).to(Z).T @ Z
    norms = sums.norm(dim=1)  # of the sums, not the means: a prototype's length does not matter
    usable = norms > 0
    if not bool(usable.any()):
        return rejected
    prototypes = sums[usable] / norms[usable].unsqueeze(1)
    lengths = U.norm(dim=1)
    similarity, nearest = (U @ prototypes.T / lengths.clamp_min(torch.finfo(U.dtype).tiny).unsqueeze(1)).max(dim=1)
    accepted = (similarity >= threshold) & (lengths > 0)
    return torch.where(accepted, classes[usable][nearest], rejected)
