"""FedRAN in plain NumPy, float64, written from the paper's equations alone."""

import numpy as np


def client_summary(H, rank):
    """Eq. 9: full thin SVD, truncated."""
    _, s, Vt = np.linalg.svd(H, full_matrices=False)
    r = min(rank, *H.shape)
    return Vt[:r].T, s[:r]


def merge(parts, rank):
    """Eq. 16-19 for two or more summaries."""
    A = np.concatenate([V * s for V, s in parts], axis=1)
    Q, R = np.linalg.qr(A)
    U, S, _ = np.linalg.svd(R, full_matrices=False)
    return Q @ U[:, :rank], S[:rank]


def sequential(parts, rank):
    merged = parts[0]
    for part in parts[1:]:
        merged = merge([merged, part], rank)
    return merged


def joint(parts, rank):
    return merge(parts, rank) if len(parts) > 1 else parts[0]


SPATIAL = {"sequential": sequential, "joint": joint}


def fedran(tasks, P, rank, ridge, order="sequential"):
    """The classifier after each task (Alg. 1).

    tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M) or None.
    """
    state, B, classifiers = None, None, []
    for clients in tasks:
        classes = 1 + max(int(labels.max()) for _, labels in clients if len(labels))
        parts = []
        for Z, labels in clients:
            H = Z if P is None else np.maximum(Z @ P, 0)
            if B is None:
                B = np.zeros((H.shape[1], 0))
            B = np.pad(B, ((0, 0), (0, max(0, classes - B.shape[1]))))
            if len(labels):
                B = B + H.T @ np.eye(classes)[labels]
                parts.append(client_summary(H, rank))
        spatial = SPATIAL[order](parts, rank)
        state = spatial if state is None else merge([state, spatial], rank)
        V, s = state
        classifiers.append(V @ np.diag(1 / (s**2 + ridge)) @ V.T @ B)
    return classifiers


def relative_tail(tasks, P, rank, order="sequential"):
    """Corollary 2 after all tasks, from full spectra: eta_loc, eta_merge, L_t, E_t, R^2 N_t and tr(G - G~).

    Each upload counts the merges that it goes through and that drop something; P (d, M).
    """
    M = P.shape[1]
    G, energies, lengths, local, shares, passed = np.zeros((M, M)), [], [], [0.0], [0.0], {}

    def combine(parts, limit):
        if len(parts) == 1:
            return parts[0]
        S = sum((V * s**2) @ V.T for (V, s), _ in parts)
        values, members = np.linalg.eigvalsh(S)[::-1], [name for _, names in parts for name in names]
        tail = values[limit:].sum()
        if tail > 1e-10 * values.sum():
            shares.append(tail / np.trace(S))
            for name in members:
                passed[name] += 1
        return merge([part for part, _ in parts], limit), members

    def in_turn(parts):
        merged = parts[0]
        for part in parts[1:]:
            merged = combine([merged, part], rank)
        return merged

    spatial = {"sequential": in_turn, "joint": lambda parts: combine(parts, rank)}[order]
    state = None
    for t, clients in enumerate(tasks):
        parts = []
        for k, (Z, labels) in enumerate(clients):
            if not len(labels):
                continue
            H = np.maximum(Z @ P, 0)
            s = np.linalg.svd(H, compute_uv=False)
            G += H.T @ H
            energies.append((H**2).sum())
            lengths.extend((H**2).sum(axis=1))
            local.append((s[rank:] ** 2).sum() / energies[-1])
            passed[t, k] = 0
            parts.append((client_summary(H, rank), [(t, k)]))
        own = spatial(parts)
        state = own if state is None else combine([state, own], rank)
    (V, s), _ = state
    found = {"eta_local": max(local), "eta_merge": max(shares), "truncations": max(passed.values())}
    trace = np.trace(G - (V * s**2) @ V.T)
    return {**found, "energy": sum(energies), "RN": max(lengths) * len(lengths), "trace_error": trace}
