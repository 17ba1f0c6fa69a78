"""FedGen in plain NumPy float64, sample by sample, from the equations."""

from __future__ import annotations

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def generate(G: dict[str, np.ndarray], labels: np.ndarray, noise: np.ndarray, training: bool) -> np.ndarray:
    """Linear of [one-hot, eps] - batch norm - ReLU - Linear, on one matrix (h, C + N)."""
    first = np.concatenate([G["classes"].T, G["noise.weight"]], axis=1)
    inputs = np.concatenate([np.eye(len(G["classes"]))[labels], noise], axis=1)
    hidden = inputs @ first.T + G["noise.bias"]
    mean, var = (hidden.mean(0), hidden.var(0)) if training else (G["norm.running_mean"], G["norm.running_var"])
    hidden = (hidden - mean) / np.sqrt(var + 1e-5) * G["norm.weight"] + G["norm.bias"]
    return np.maximum(hidden, 0) @ G["out.weight"].T + G["out.bias"]


def teaching(made: np.ndarray, labels: np.ndarray, heads: list[tuple[np.ndarray, np.ndarray]], counts: np.ndarray):
    """sum_k mean_i omega_k(y_i) CE(W_k G_i + b_k, y_i), and its gradient with respect to G (b, d)."""
    total, gradient = 0.0, np.zeros_like(made)
    for (W, b), own in zip(heads, counts, strict=True):
        for i, y in enumerate(labels):
            omega = own[y] / sum(theirs[y] for theirs in counts)
            p = softmax(made[i : i + 1] @ W.T + b)[0]
            total += omega * -np.log(p[y]) / len(labels)
            gradient[i] += omega * (p - np.eye(len(p))[y]) @ W / len(labels)
    return total, gradient


def diversity(noise: np.ndarray, made: np.ndarray) -> float:
    b = len(noise)
    pairs = [((noise[i] - noise[j]) ** 2).mean() * np.abs(made[i] - made[j]).mean() for i in range(b) for j in range(b)]
    return float(np.exp(-sum(pairs) / b**2))


def client_loss(W, b, Z, labels, made_of_labels, made, drawn, alpha, beta, ratio) -> float:
    """CE + beta KL(softmax(W G(y) + b) || softmax(W z + b)) + ratio alpha CE(W G(y') + b, y')."""
    said = softmax(Z @ W.T + b)
    wanted = softmax(made_of_labels @ W.T + b)
    agreement = (wanted * (np.log(wanted) - np.log(said))).sum(axis=1).mean()
    own = -np.log(said[np.arange(len(labels)), labels]).mean()
    theirs = -np.log(softmax(made @ W.T + b)[np.arange(len(drawn)), drawn]).mean()
    return own + beta * agreement + ratio * alpha * theirs


def client_gradient(W, b, Z, labels, made_of_labels, made, drawn, alpha, beta, ratio) -> tuple[np.ndarray, np.ndarray]:
    """Of `client_loss`, with respect to W and b; the head's outputs on G(y) are constants."""
    said, wanted = softmax(Z @ W.T + b), softmax(made_of_labels @ W.T + b)
    C = len(b)
    own = (said - np.eye(C)[labels]) + beta * (said - wanted)
    theirs = ratio * alpha * (softmax(made @ W.T + b) - np.eye(C)[drawn])
    return own.T @ Z / len(Z) + theirs.T @ made / len(made), own.mean(axis=0) + theirs.mean(axis=0)
