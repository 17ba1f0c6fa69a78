"""Which task a sample belongs to, from the subspaces of the tasks' final-layer inputs (FedProTIP 4.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fcl_bench.config import knob


@dataclass
class Tip:
    """`method.tip`: how a test sample's task is predicted; see conf/method/fedprotip.yaml."""

    route: str = knob("sample", choices=("sample", "batch"))
    batch: int = knob(64, least=1)
    references: str = knob("learnt", choices=("learnt", "updated"))
    clients: int | None = knob(None, least=1)
    rule: str = knob("means", choices=("means", "batches"))


@dataclass
class HeadRank:
    """`method.head_rank`: directions of the final layer's inputs, whatever the spectrum."""

    first: int = knob(30, least=1)
    others: int = knob(20, least=0)

    def of(self, task: int, first: bool, clients: int) -> int:
        """How many directions one of K `clients` adds; `first`: whether nobody has added any before it."""
        if task == 0:
            return self.first if first else self.others // (clients - 1)
        return self.others // clients


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
    return _routed(omega, _unit(references), known)


def batch_relevance(omega: torch.Tensor) -> torch.Tensor:
    """The relevance of a batch whose samples have relevance omega (n, T): the root of the mean square (1, T).

    The public code takes the norm of the whole batch's projection, which is longer by the root of n: cosines are the
    same, and so are comparisons of sizes between batches of one size.
    """
    return omega.square().mean(dim=0, keepdim=True).sqrt()


def batch_reference(omega: torch.Tensor, batch: int) -> torch.Tensor:
    """(T,) a client's reference of a task by the public code's rule, for `route_by_batches`.

    It is the mean over batches of their relevance in the subspaces of the second and later tasks, each batch's scaled
    to length 1. Then its product with a relevance of length 1 is the mean cosine. With two tasks there is only one such
    subspace, and the unscaled relevance is averaged.

    Args:
        omega: (n, T) relevance of the client's samples of the task.
        batch: samples in a batch; the last one has the rest.
    """
    rows = torch.cat([_later(batch_relevance(part)) for part in omega.split(batch)])
    return (_unit(rows) if omega.shape[1] > 2 else rows).mean(dim=0)


def route_by_batches(omega: torch.Tensor, references: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The task (n,) by the public code's rule: as `route`, by the mean cosine with the batches of each client and task.

    With two tasks it is the one whose mean reference over clients is nearer in size to the relevance; it is the first
    below the first one's reference, and the second above the second one's.

    Args:
        omega: (n, T) relevance of the samples, or of batches (`batch_relevance`).
        references: (K, T, T) of `batch_reference`.
        known: (K, T) bool: whether client k has one of task tau.
    """
    omega = _later(omega)
    if omega.shape[1] != 2:
        return _routed(omega, references, known)
    counts = known.sum(dim=0).clamp(min=1)
    first, second = ((references[..., 1] * known).sum(dim=0) / counts).unbind()
    size = omega[:, 1]
    nearer = (size - first).abs() >= (size - second).abs()
    return ((size >= first) & ((size > second) | nearer)).long()


def _later(omega: torch.Tensor) -> torch.Tensor:
    """Relevance (n, T) without that to the first task's subspace."""
    return torch.cat([torch.zeros_like(omega[:, :1]), omega[:, 1:]], dim=1)


def _routed(omega: torch.Tensor, references: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Count the votes block by block; the references are already scaled to the length that the similarities need."""
    voters = known.any(dim=1)
    references, known = references[voters], known[voters]
    found = []
    for block in omega.split(max(1, _BLOCK // max(1, references.numel()))):
        # A matrix product is not used: its rounding depends on the column, and equal references must stay equal.
        similarity = (_unit(block)[:, None, None, :] * references).sum(dim=3)
        votes = similarity.masked_fill(~known, -torch.inf).argmax(dim=2)
        counts = torch.nn.functional.one_hot(votes, known.shape[1]).sum(dim=1)
        total = (similarity * known).sum(dim=1)
        # The most votes; among those tied, the largest sum; argmax takes the first of what is still equal.
        leading = counts == counts.amax(dim=1, keepdim=True)
        found.append(total.masked_fill(~leading, -torch.inf).argmax(dim=1))
    return torch.cat(found)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """The vectors along the last axis scaled to length 1; zero vectors stay zero.

    `torch.nn.functional.normalize` shortens vectors below 1e-12, and faint ones must be routed like strong ones.
    """
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(length > 0, length, torch.ones_like(length))
