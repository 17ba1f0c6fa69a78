"""The Gaussian sketch in plain NumPy, float64: upload by upload, class by class, dense.

tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M).
"""

import numpy as np
from scipy.stats import norm


def coded(F, fineness=0.25):
    """F in whole steps: of `fineness` of the entries of a column of mean length, or a 127th of the largest entry."""
    lengths = [np.linalg.norm(column) for column in F.T]
    if sum(lengths) == 0:
        return F
    step = max(fineness * sum(x**2 for x in lengths) / sum(lengths) / np.sqrt(len(F)), np.abs(F).max() / 127)
    return np.array([[np.round(entry / step) * step for entry in row] for row in F]).reshape(F.shape)


def sketch_of(X, labels, rank):
    """V, sigma of X minus its class means, the energy before truncation, and sum and count per class held."""
    A, sums, counts = X.copy(), {}, {}
    for c in sorted({int(label) for label in labels}):
        rows = labels == c
        sums[c], counts[c] = X[rows].sum(axis=0), int(rows.sum())
        A[rows] = X[rows] - sums[c] / counts[c]
    _, s, Vt = np.linalg.svd(A, full_matrices=False)
    keep = [i for i in range(min(rank, len(s))) if s[i] > 1e-12 * max(s[0], 1e-300)]
    return Vt[keep].T, s[keep], np.sum(A**2), sums, counts


def covariance_of_relu(P, Sigma, mu):
    """Mehler's series after order 2 with the exact diagonal, entry by entry where it is not a product."""
    M = P.shape[1]
    s = np.array([np.sqrt(max(P[:, i] @ Sigma @ P[:, i], 0)) for i in range(M)])
    Q = np.zeros((M, M))
    live = s > 0
    m = np.array([P[:, i] @ mu / s[i] if live[i] else 0.0 for i in range(M)])
    c1, c2 = s * norm.cdf(m), s * norm.pdf(m)
    cross = P.T @ Sigma @ P
    for i in range(M):
        for j in range(M):
            if i == j:
                Phi, phi = norm.cdf(m[i]), norm.pdf(m[i])
                Q[i, i] = s[i] ** 2 * ((m[i] ** 2 + 1) * Phi + m[i] * phi - (m[i] * Phi + phi) ** 2)
            elif live[i] and live[j]:
                rho = cross[i, j] / (s[i] * s[j])
                Q[i, j] = c1[i] * c1[j] * rho + c2[i] * c2[j] * rho**2 / 2
    return Q


def own_covariance(known, energy, size, Sigma, rank):
    """b Sigma + LL' of a class: LL' is what the leading part of its known scatter has beyond the common shape."""
    values, vectors = np.linalg.eigh(known)
    leading = [i for i in np.argsort(values)[::-1][:rank] if values[i] > 1e-12 * values.max()]
    common = [vectors[:, i] @ Sigma @ vectors[:, i] for i in leading]
    left = np.trace(Sigma) - sum(common)
    beta = 0.0
    if left > 1e-12 * np.trace(Sigma):
        beta = max(energy - sum(values[leading]), 0) / left
    L = np.zeros((len(Sigma), max(len(leading), 1)))
    for column, (i, c) in enumerate(zip(leading, common, strict=True)):
        L[:, column] = vectors[:, i] * np.sqrt(max(values[i] - beta * c, 0) / size)
    return beta / size * Sigma + L @ L.T


def relu_sum(P, Sigma_c, total, count, energy):
    """The sum of ReLU(P'z) over `count` draws of a Gaussian of this mean, Sigma_c's shape and this energy."""
    mu, trace = total / count, np.trace(Sigma_c)
    spread = energy / count / trace if trace > 0 else 0.0
    S = np.zeros(P.shape[1])
    for i in range(P.shape[1]):
        s, centre = np.sqrt(max(spread * (P[:, i] @ Sigma_c @ P[:, i]), 0)), P[:, i] @ mu
        S[i] = count * (s * norm.pdf(centre / s) + centre * norm.cdf(centre / s) if s > 0 else max(centre, 0))
    return S


def states(tasks, P, rank, class_rank, mix):
    """(G, B, terms) after each task: `terms`, of this task, are what each upload's rest was replaced by."""
    d = tasks[0][0][0].shape[1]
    M = P.shape[1]
    G, B, scatter, N, after = np.zeros((M, M)), np.zeros((M, 0)), np.zeros((d, d)), 0, []
    for clients in tasks:
        uploads, means, sizes, known, energies = [], {}, {}, {}, {}
        for Z, labels in clients:
            if len(labels) == 0:
                continue
            H = np.maximum(Z @ P, 0)
            C = max(B.shape[1], 1 + int(labels.max()))
            B = np.pad(B, ((0, 0), (0, C - B.shape[1])))
            V, sigma, energy, measured, counts = sketch_of(H, labels, rank)
            F = coded(V * sigma)
            left, lengths, _ = np.linalg.svd(F, full_matrices=False)
            live = lengths > 1e-12 * max([*lengths, 1e-300])
            V, sigma = left[:, live], lengths[live]
            _, _, _, sums, counts = sketch_of(Z, labels, 0)
            own, parts = np.zeros((d, d)), {}
            columns, spectra = [], {}
            for c in sums:
                U, omega, spectra[c], _, _ = sketch_of(Z[labels == c], labels[labels == c], class_rank)
                parts[c] = (len(columns), len(columns) + len(omega))
                columns += list((U * omega).T)
            factors = coded(np.array(columns).reshape(-1, d).T, 0.6)
            for c, (first, last) in parts.items():
                part = factors[:, first:last] @ factors[:, first:last].T
                known[c], energies[c] = known.get(c, 0) + part, energies.get(c, 0) + spectra[c]
                own += part
            for i in range(d):
                exact = sum((Z[j, i] - sums[int(c)][i] / counts[int(c)]) ** 2 for j, c in enumerate(labels))
                own[i, i] = max(own[i, i], exact)
            scatter = scatter + own
            N += len(labels)
            for c, total in sums.items():
                means[c], sizes[c] = means.get(c, 0) + total, sizes.get(c, 0) + counts[c]
            uploads.append((V, sigma, max(energy - np.sum(sigma**2), 0), measured, sums, counts, spectra))
        Sigma = scatter / N
        Sigmas = {c: own_covariance(known[c], energies[c], sizes[c], Sigma, class_rank) for c in means}
        Q = np.zeros((M, M))
        for c, total in means.items():
            Q = Q + sizes[c] * covariance_of_relu(P, Sigmas[c], total / sizes[c])
        terms = []
        for V, sigma, e, measured, sums, counts, spectra in uploads:
            r = len(sigma)
            Pi = np.eye(M) - V @ V.T
            shape = Pi @ Q @ Pi
            beyond = np.trace(shape) > 1e-12 * np.trace(Q)
            level = (mix if beyond else 1) * e / (M - r) if r < M else 0.0
            term = level * np.eye(M) + (e * (1 - mix) / np.trace(shape) * shape if beyond else 0)
            terms.append(term)
            G = G + V @ np.diag(np.maximum(sigma**2 - level, 0)) @ V.T + term
            for c, count in counts.items():
                S = V @ V.T @ measured[c] + Pi @ relu_sum(P, Sigmas[c], sums[c], count, spectra[c])
                B[:, c] += S
                G = G + np.outer(S, S) / count
        after.append((G, B.copy(), terms))
    return after


def gaussian_sketch(tasks, P, rank, class_rank, mix, ridge):
    """W = (G + ridge I)^-1 B after each task."""
    after = states(tasks, P, rank, class_rank, mix)
    return [np.linalg.solve(G + ridge * np.eye(len(G)), B) for G, B, _ in after]
