"""Substitutes for the part that the sketches drop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fcl_bench.linalg.gram import add_gram, gram
from sketches.gaussian import modelled
from sketches.local import Local
from sketches.rounding import rounded
from sketches.uploads import Sent
from sketches.variants import Variant

Tensor = torch.Tensor


def add_dropped(
    G: Tensor,
    v: Variant,
    P: Tensor,
    Sigma: Tensor,
    sent: Sequence[Sent],
    clients: Sequence[Local],
    shared: dict[tuple, Tensor],
) -> None:
    """G += the substitute for the part that the sketches drop.

    Args:
        G: (M, M).
        v: the variant.
        P: (d, M), in the type that models are computed in.
        Sigma: (d, d), the pooled covariance of the backbone's features.
        sent, clients: the task's uploads, and what they are of.
        shared: Q of this task, which variants with the same Sigma have in common.
    """
    M = len(G)
    mixes = [v.mix_samples / (v.mix_samples + one.samples) if v.mix_samples else v.mix for one in sent]
    before = G.clone() if v.diagonal == "hidden" else G
    if v.remainder == "isotropic":
        V = torch.cat([one.V * (one.rest / (M - one.V.shape[1])) ** 0.5 for one in sent], dim=1)
        add_gram(G, V.T.contiguous(), -1).diagonal().add_(sum(one.rest / (M - one.V.shape[1]) for one in sent))
    elif v.own_counts:
        means = sum(one.S_z for one in sent) / sum(one.n for one in sent).clamp_min(1)
        for one, mix in zip(sent, mixes, strict=True):
            mixed = v.own_sigma * one.sigma / one.samples + (1 - v.own_sigma) * Sigma
            Q = modelled(P, mixed, means, one.n, torch.arange(len(one.n)), v.order)
            add_remainders(G, Q, [one], [mix])
    else:
        key = (v.own_means, v.order, *origin(v))
        if v.own_means or v.clusters > 1:
            c = len(sent[0].n)
            means, sizes = (torch.cat([getattr(one, name) for one in sent], -1) for name in ("means", "sizes"))
            group = torch.cat([one.group + c * number for number, one in enumerate(sent)])
        else:
            sizes = sum(one.n for one in sent)
            means, group = sum(one.S_z for one in sent) / sizes.clamp_min(1), torch.arange(len(sizes))
        if key not in shared:
            shared[key] = modelled(P, Sigma, means, sizes, group, v.order)
        add_remainders(G, shared[key], sent, mixes)
    if v.diagonal == "hidden":
        added = G - before
        exact = sum(one.hidden.A.square().sum(0) for one in clients)
        exact = (exact - sum(one.factor.square().sum(1) for one in sent)).clamp_min(0)
        if v.remainder == "isotropic":
            G.copy_(before).diagonal().add_(exact)
        else:
            ratio = (exact / added.diagonal().clamp_min(1e-300)).sqrt()
            G.copy_(before.addcmul_(added.mul_(ratio), ratio[:, None]))


def origin(v: Variant) -> tuple:
    """What Sigma and the means of the backbone's features depend on."""
    return (v.input_rank, v.bits, v.diagonal == "input", v.centre, v.clusters, v.linear)


def add_difference(G: Tensor, v: Variant, P: Tensor, one: Sent, local: Local) -> None:
    """G += model + V diag(l) V', V the directions in which A'A differs most from the client's model of it."""
    M = len(G)
    model = modelled(P, one.sigma / one.samples, one.means, one.sizes, one.group, v.order)
    model *= (1 - v.mix) * local.hidden.energy / float(model.trace())
    model.diagonal().add_(v.mix * local.hidden.energy / M)
    A, rng = local.hidden.A.to(model), torch.Generator().manual_seed(0)
    X = torch.randn(M, min(M, v.rank + 16), generator=rng, dtype=model.dtype)
    for _ in range(6):
        X = torch.linalg.qr(A.T @ (A @ X) - model @ X)[0]
    values, turn = torch.linalg.eigh((gram(A @ X) - X.T @ model @ X).double())
    X = X.double()
    first = values.abs().argsort(descending=True)[: v.rank]
    V = rounded(X @ turn[:, first], v.bits)
    G += model
    G += (V * values[first]) @ V.T


def add_remainders(G: Tensor, Q: Tensor, sent: Sequence[Sent], mixes: Sequence[float]) -> None:
    """G += sum of rest [(1 - mix) Pi Q Pi / tr(Pi Q Pi) + mix Pi / (M - r)], Pi = I - V V', in place.

    As `algebra.remainder.add_sketches` does it for sketches of leading directions, all with one mix. That one
    raises kept eigenvalues that lie below the even part, as no leading ones do. Directions that the server or a model
    chose may, and would gain energy.
    """
    V = torch.cat([one.V for one in sent], dim=1).to(Q)
    QV, left, first, second = Q @ V, [], 0.0, 0.0
    for one, part, mix in zip(sent, QV.split([one.V.shape[1] for one in sent], dim=1), mixes, strict=True):
        own = one.V.to(Q)
        inner, M, r = own.T @ part, len(Q), own.shape[1]
        trace = float(Q.diagonal().sum() - 2 * inner.diagonal().sum() + (inner * (own.T @ own)).sum())
        a = one.rest * (1 - mix) / trace if trace > 0 else 0.0
        b = one.rest * (mix if trace > 0 else 1.0) / (M - r) if r < M else 0.0
        left.append(a * (part - own @ (inner / 2)) + b / 2 * own)
        first, second = first + a, second + b
    taken = torch.cat(left, dim=1) @ V.T
    G.add_((taken + taken.T).neg_().add_(Q, alpha=first))
    G.diagonal().add_(second)
