"""Plain code for what the library does, as public implementations have it: written from the papers' equations.

Loops over samples, groups and clients; one inverse where an equation prints one; an SVD where it says SVD. Results are
the library's (tests/benchmarks); only the time is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

#: Test samples of a batch.
BATCH = 128


def random_features(Z: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """H = ReLU(Z P)."""
    return torch.relu(torch.matmul(Z, P))


def class_sums(H: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """C (M, c): sample by sample, the sum of each class's features."""
    C = torch.zeros(H.shape[1], classes, dtype=H.dtype, device=H.device)
    for h, label in zip(H, labels.tolist(), strict=True):
        C[:, label] += h
    return C


def statistics(
    Z: torch.Tensor, labels: torch.Tensor, P: torch.Tensor, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """STSA Eq. 1-2 on one client: G = H'H, and the class sums."""
    H = random_features(Z, P)
    return H.T @ H, class_sums(H, labels, classes)


def group_sums(
    H: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, groups: int, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """STSA-E on one client, sample by sample: C (M, groups, c) and the counts (groups, c)."""
    C = torch.zeros(H.shape[1], groups, classes, dtype=H.dtype, device=H.device)
    n = torch.zeros(groups, classes, dtype=torch.int32, device=H.device)
    for h, label, own in zip(H, labels.tolist(), group.tolist(), strict=True):
        C[:, own, label] += h
        n[own, label] += 1
    return C, n


def scatter(C: torch.Tensor, n: torch.Tensor, updates: int | None = None) -> torch.Tensor:
    """STSA-E Eq. 9 as printed: for each class a rank-one update of G (M, M) for every group.

    Args:
        C: (M, groups, c) class sums.
        n: (groups, c) counts.
        updates: of these rank-one updates do only the first so many; None: all, and the last term.
    """
    M, groups, classes = C.shape
    G = torch.zeros(M, M, dtype=C.dtype, device=C.device)
    done = 0
    for i in range(classes):
        n_i = int(n[:, i].sum())
        first = max((n_i - 1) / (groups - 1), 0.0)
        for j in range(groups):
            if done == updates:
                return G
            done += 1
            if n[j, i] > 0:
                G += first * torch.outer(C[:, j, i], C[:, j, i]) / n[j, i]
        S = C[:, :, i].sum(dim=1)
        G -= max((n_i - groups) / (n_i * (groups - 1)), 0.0) * torch.outer(S, S)
    return G


def summary(H: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FedRAN Eq. 9: the whole SVD of H (n, M), then its first `rank` right singular vectors and values."""
    _, S, Vh = torch.linalg.svd(H, full_matrices=False)
    return Vh[:rank].T, S[:rank]


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """FedRAN Eq. 16-19: A = [V_1 S_1, V_2 S_2] = Q R, R = U S W', V = Q U."""
    A = torch.cat([first[0] * first[1], second[0] * second[1]], dim=1)
    Q, R = torch.linalg.qr(A)
    U, S, _ = torch.linalg.svd(R)
    return (Q @ U)[:, :rank], S[:rank]


def shifted(A: torch.Tensor, shift: float) -> torch.Tensor:
    """A + shift I."""
    return A + shift * torch.eye(len(A), dtype=A.dtype, device=A.device)


def inverse_ridge(G: torch.Tensor, B: torch.Tensor, ridge: float) -> torch.Tensor:
    """W = (G + ridge I)^-1 B, with the inverse."""
    return torch.linalg.inv(shifted(G, ridge)) @ B


def aggregated(
    uploads: Iterable[tuple[torch.Tensor, torch.Tensor]], gamma: float, ridge: float = 0.0, last: bool = True
) -> torch.Tensor | None:
    """AFL Eq. 9-11, 16: uploads (C_k, W_k) pairwise, with an inverse for every client, and the regularisers out.

    Args:
        gamma: the regulariser of each client.
        ridge: one that stays (AFCL Eq. 10).
        last: take the regularisers out at the end.
    """
    C = W = None
    number = 0
    for C_k, W_k in uploads:
        number += 1
        if C is None:
            C, W = C_k, W_k
            continue
        W = torch.linalg.inv(C + C_k) @ (C @ W + C_k @ W_k)
        C = C + C_k
    if C is None or not last:
        return W
    return inverse_ridge(C, C @ W, ridge - number * gamma)


def weighted(uploads: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """AFL Eq. 8-11 term by term, with the signs that hold: W = A_u W_u + A_v W_v for a pair u, v of aggregates, where

        A_u = I - R_u C_v + R_u C_v (C_u + C_v)^-1 C_v,  R_u = C_u^-1,  and A_v likewise.

    Uploads are (C_k, R_k, W_k): clients invert their own matrices.
    """
    C = R = W = None
    for C_k, R_k, W_k in uploads:
        if C is None:
            C, R, W = C_k, R_k, W_k
            continue
        W = _weight(C, R, C_k) @ W + _weight(C_k, R_k, C) @ W_k
        C = C + C_k
        R = torch.linalg.inv(C)
    return W


def _weight(C_u: torch.Tensor, R_u: torch.Tensor, C_v: torch.Tensor) -> torch.Tensor:
    """A_u of Eq. 8."""
    eye = torch.eye(len(C_u), dtype=C_u.dtype, device=C_u.device)
    return eye - R_u @ C_v + R_u @ C_v @ torch.linalg.inv(C_u + C_v) @ C_v


def predict(Z: torch.Tensor, P: torch.Tensor | None, W: torch.Tensor) -> torch.Tensor:
    """Scores (n, C) batch by batch."""
    parts = []
    for batch in Z.split(BATCH):
        H = batch if P is None else random_features(batch, P)
        parts.append(H @ W)
    return torch.cat(parts)


def merged(summaries: Sequence[tuple[torch.Tensor, torch.Tensor]], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A task's summaries, one after the other."""
    result = summaries[0]
    for summary_ in summaries[1:]:
        result = merge(result, summary_, rank)
    return result
