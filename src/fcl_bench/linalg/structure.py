"""Whether matrices of statistics are, to rounding, positive semidefinite or orthonormal: cheap looks, no proofs."""

from __future__ import annotations

from functools import lru_cache

import torch

from fcl_bench.linalg.triangle import symmetric

#: Size up to which a Cholesky factorisation tells whether a matrix is positive semidefinite; above it costs too much.
EXACT = 256
#: Columns of the random block whose products with a larger matrix are looked at.
_PROBES = 8
#: Rows of a larger matrix whose entries are looked at together.
_ROWS = 64
#: By how many roundings entries may differ from what they should be.
_SLACK = 4


def gram_trouble(G: torch.Tensor, rounding: float) -> str:
    """Why G (M, M) is no Gram matrix to rounding; "": nothing was found.

    Looked at are every diagonal entry and every 2 x 2 minor, |g_ij|^2 <= g_ii g_jj; symmetry; and negative eigenvalues,
    below -4 rounding tr(G). Up to `EXACT` rows a Cholesky factorisation finds all of these. Above, there are only the
    eigenvalues on a Krylov space of a random block, at products with 8 and 16 columns: they show a negative eigenvalue
    of some percent of the largest, and may miss a smaller one.

    Args:
        G: finite.
        rounding: relative error of its entries.
    """
    diagonal = G.diagonal().double()
    if not len(diagonal):
        return ""
    largest = float(diagonal.max())
    if float(diagonal.min()) < -_SLACK * rounding * max(largest, 0.0):
        return f"has {float(diagonal.min()):.3g} on its diagonal"
    if largest <= 0:
        return "is not zero, and its diagonal is" if bool(G.any()) else ""
    # A 16-bit type loses what is far below the largest entry of a column.
    roots = (diagonal.clamp_min(0).sqrt() + rounding * largest**0.5).to(G.dtype)
    limits = (1 + _SLACK * rounding) * roots
    for begin in range(0, len(G), _ROWS):
        room = torch.outer(limits[begin : begin + _ROWS], roots).sub_(G[begin : begin + _ROWS].abs())
        if float(room.min()) < 0:
            row, column = divmod(int(room.argmin()), len(G))
            return f"has an entry ({begin + row}, {column}) larger than its rows' diagonal entries allow"
    return _asymmetry(G, roots, rounding) or _negative(G, rounding)


def _asymmetry(G: torch.Tensor, roots: torch.Tensor, rounding: float) -> str:
    """Small matrices entry by entry, others by (G - G')x for a random x, which is 0 for no G but a symmetric one."""
    if len(G) <= EXACT:
        apart, allowed = (G - G.T).abs(), torch.outer(roots, roots)
    else:
        x = _block(len(G))[:, :1].to(G)
        apart, allowed = (G @ x - G.T @ x).abs(), (roots * torch.linalg.vector_norm(roots)).unsqueeze(1)
    return "is not symmetric" if bool((apart > _SLACK * rounding * allowed).any()) else ""


def _negative(G: torch.Tensor, rounding: float) -> str:
    allowed = _SLACK * rounding * float(G.diagonal().sum(dtype=torch.float64))
    if len(G) <= EXACT:
        shifted = G.to(torch.float64, copy=True)
        # What the factorisation itself rounds.
        shifted.diagonal().add_(allowed + len(G) * 2**-52 * float(G.diagonal().max()))
        if not bool(torch.linalg.cholesky_ex(shifted)[1]):
            return ""
        smallest = float(torch.linalg.eigvalsh(G.double())[0])
    else:
        smallest = _smallest_seen(G)
    return f"has an eigenvalue of {smallest:.3g}" if smallest < -allowed else ""


def _smallest_seen(G: torch.Tensor) -> float:
    """The smallest Ritz value of G on the span of Q and GQ, no smaller than its smallest eigenvalue."""
    Q = _block(len(G)).to(G)
    # Orthonormal also where GQ lies in the span of Q, as with a matrix of low rank.
    space = torch.linalg.qr(torch.cat([Q, G @ Q], dim=1))[0]
    T = (space.T @ (G @ space)).double()
    return float(torch.linalg.eigvalsh((T + T.T) / 2)[0])


@lru_cache(maxsize=8)
def _block(rows: int) -> torch.Tensor:
    """(rows, probes) orthonormal columns, random but always the same."""
    drawn = torch.randn(rows, _PROBES, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    return torch.linalg.qr(drawn)[0]


def packed_grams_trouble(columns: torch.Tensor, rounding: float) -> str:
    """Why a column of `columns` (d (d + 1) / 2, k) is no Gram matrix, its upper triangle by rows; "": none is found."""
    for number, entries in enumerate(columns.T):
        if trouble := gram_trouble(symmetric(entries), rounding):
            return f"{trouble} in column {number}"
    return ""


def orthonormal_trouble(V: torch.Tensor, rounding: float) -> str:
    """Why the columns of V (M, r) are not orthonormal to rounding; "": they are."""
    if V.shape[1] > V.shape[0]:
        return f"has {V.shape[1]} columns of {V.shape[0]} numbers"
    products = V.double().T @ V.double()
    products.diagonal().sub_(1)
    apart = float(products.abs().max()) if V.numel() else 0.0
    return f"has columns whose products are off by {apart:.2g}" if apart > _SLACK * rounding else ""


def descending_trouble(sigma: torch.Tensor, rounding: float) -> str:
    """Why the numbers sigma (r,) do not descend, to rounding; "": they do."""
    rises = sigma[1:] > sigma[:-1] * (1 + _SLACK * rounding)
    return f"rises at {int(rises.nonzero()[0]) + 1}" if bool(rises.any()) else ""


def sums_trouble(
    sums: torch.Tensor, trace: float, samples: torch.Tensor | float, rounding: float, what: str = "its Gram matrix"
) -> str:
    """Why sums (M, c) can't be of samples with the Gram matrix of this trace; "": they can.

    By Cauchy and Schwarz sum_c ||S_c||^2 / n_c <= tr(G).

    Args:
        sums: over the samples of each class.
        trace: tr(G), of all samples together.
        samples: n (c,), or one number that no n_c exceeds.
        rounding: relative error of all of it.
        what: the name of G.
    """
    squares = sums.double().square().sum(dim=0)
    if isinstance(samples, torch.Tensor):
        held = samples > 0
        squares, samples = squares[held], samples[held].to(squares)
    total = float((squares / samples).sum())
    allowed = (1 + 4 * _SLACK * rounding) * trace
    return f"is larger than {what} allows: {total:.4g} where tr {what} is {trace:.4g}" if total > allowed else ""
