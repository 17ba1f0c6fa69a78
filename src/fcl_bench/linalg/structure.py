"""Symmetric matrices as one triangle, and checks that matrices are semidefinite or orthonormal."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

#: Rows and columns of a matrix mirrored at a time.
_TALL, _WIDE = 64, 512
#: Size up to which all entries and eigenvalues are checked; above it this would cost more than everything else.
EXACT = 64
#: Steps of Lanczos' iteration with a larger matrix.
_STEPS = 6
#: Between these sizes of its largest entry, products with a matrix neither overflow nor underflow in float32.
_MODERATE = (1e-20, 1e20)
#: Relative norm of a product outside the current Krylov space at which that space counts as complete.
_INVARIANT = 1e-6
#: Noise practically never exceeds this many standard deviations: once in 10^15 draws.
NOISE_BOUND = 8.0
#: The number of roundings by which entries may differ from their expected values.
_SLACK = 4


def packed(matrix: torch.Tensor) -> torch.Tensor:
    """(d (d + 1) / 2,) the entries of `matrix` (d, d) on and above its diagonal, by rows."""
    if matrix.device.type != "cpu":
        return matrix[_upper_half(matrix)]
    size = len(matrix)
    entries = matrix.new_empty(size * (size + 1) // 2)
    rows, into, at = _numbers(matrix), _numbers(entries), 0
    # Row by row: a mask of all entries takes five times as long.
    for row in range(size):
        into[at : at + size - row] = rows[row, row:]
        at += size - row
    return entries


def triangular(entries: torch.Tensor) -> torch.Tensor:
    """(d, d) the upper triangular matrix whose `packed` entries these are. Raises `ValueError` if there is none."""
    size = math.isqrt(2 * len(entries))
    if len(entries) != size * (size + 1) // 2:
        raise ValueError(f"{len(entries)} entries are no triangle")
    matrix = entries.new_zeros(size, size)
    if matrix.device.type != "cpu":
        matrix[_upper_half(matrix)] = entries
        return matrix
    rows, taken, at = _numbers(matrix), _numbers(entries), 0
    for row in range(size):
        rows[row, row:] = taken[at : at + size - row]
        at += size - row
    return matrix


def symmetric(entries: torch.Tensor) -> torch.Tensor:
    """(d, d) the symmetric matrix whose `packed` entries these are."""
    return mirror(triangular(entries))


def mirror(G: torch.Tensor) -> torch.Tensor:
    """Make a matrix symmetric whose upper triangle is right, in place and by blocks."""
    # Columns are read from a copy whose row stride is not a power of two; with such strides a cache holds few rows.
    copied = G.new_empty(_TALL, _WIDE + 8)
    for begin in range(0, len(G), _TALL):
        end = begin + _TALL
        corner = G[begin:end, begin:end]
        corner.copy_(corner.triu() + corner.triu(1).T)
        for left in range(end, len(G), _WIDE):
            block = G[begin:end, left : left + _WIDE]
            G[left : left + _WIDE, begin:end] = copied[: block.shape[0], : block.shape[1]].copy_(block).T
    return G


def _upper_half(matrix: torch.Tensor) -> torch.Tensor:
    """(d, d) bool: which entries of `matrix` (d, d) are on or above the diagonal."""
    return torch.ones_like(matrix, dtype=torch.bool).triu()


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """A NumPy view of the tensor's memory; NumPy has no bfloat16, so its two bytes are copied as integers."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def gram_trouble(G: torch.Tensor, rounding: float, proven: bool = False) -> str:
    """Why G (M, M) is no Gram matrix to rounding; "": nothing was found.

    Up to `EXACT` rows, or if it has to be proven, the checks cover the diagonal, symmetry and, by a Cholesky
    factorisation, eigenvalues below -4 rounding tr(G). If that of G + s I in float64 comes to its end, then no
    eigenvalue is below -s - (M + 1) 2^-52 tr(G + s I) (Higham 2002, Thm. 10.3), with s = 4 rounding tr(G) + M 2^-52
    max g_ii.

    Else, at the cost of seven products with a vector, they cover the diagonal, whose largest entry no other may exceed;
    (G - G')x for a random x that is no secret; and the smallest Ritz value of six steps of Lanczos' iteration, which
    finds a negative eigenvalue of the size of the mean one, and may miss a smaller one. Such a finding is confirmed by
    all eigenvalues.

    Args:
        G: finite.
        rounding: relative error of its entries.
    """
    diagonal = G.diagonal().double()
    if not len(diagonal):
        return ""
    least, largest = (float(end) for end in torch.aminmax(diagonal))
    if least < -_SLACK * rounding * max(largest, 0.0):
        return f"has {least:.3g} on its diagonal"
    if largest <= 0:
        return "is not zero, and its diagonal is" if bool(G.any()) else ""
    allowed = _SLACK * rounding * float(diagonal.sum())
    # A 16-bit type loses entries far below the largest entry of a column.
    roots = diagonal.clamp_min(0).sqrt() + rounding * largest**0.5
    looks = _looked_at if proven or len(G) <= EXACT else _probed
    return looks(G, roots, rounding, allowed)


def _looked_at(G: torch.Tensor, roots: torch.Tensor, rounding: float, allowed: float) -> str:
    G = G.double()
    if len(G) <= EXACT:  # the factorisation finds what these would
        room = (1 + _SLACK * rounding) * torch.outer(roots, roots) - G.abs()
        if float(room.min()) < 0:
            row, column = divmod(int(room.argmin()), len(G))
            return f"has an entry ({row}, {column}) larger than its rows' diagonal entries allow"
    for begin in range(0, len(G), _TALL):
        end = begin + _TALL
        apart = (G[begin:end, :end] - G[:end, begin:end].T).abs_().div_(roots[begin:end, None]).div_(roots[:end])
        if float(apart.max()) > _SLACK * rounding:
            return "is not symmetric"
    # The rounding of the factorisation itself is included.
    shift = allowed + len(G) * 2**-52 * float(G.diagonal().max())
    shifted = G.clone()
    shifted.diagonal().add_(shift)
    if not bool(torch.linalg.cholesky_ex(shifted)[1]):
        return ""
    smallest = float(torch.linalg.eigvalsh((G + G.T) / 2)[0])
    return f"has an eigenvalue of {smallest:.3g}" if smallest < -shift else ""


def _probed(G: torch.Tensor, roots: torch.Tensor, rounding: float, allowed: float) -> str:
    unit = float(roots.max()) ** 2
    # In float32, which takes half the time, if the wire had no more digits.
    G = G.to(torch.float32 if rounding >= torch.finfo(torch.float32).eps else torch.float64)
    largest = max(abs(float(end)) for end in torch.aminmax(G))
    if largest > (1 + _SLACK * rounding) * unit:
        return f"has an entry of size {largest:.3g}, larger than any on its diagonal"
    # Products are those with G / unit, so that no square overflows. G itself is divided only if its size demands it.
    scale = unit
    if not _MODERATE[0] < unit < _MODERATE[1]:
        G, scale = G / unit, 1.0
    roots, allowed = (roots / unit**0.5).to(G), allowed / unit
    x = _direction(len(G)).to(G)
    image = (G @ x).div_(scale)
    apart = (image - (G.T @ x).div_(scale)).abs()
    if bool((apart > _SLACK * rounding * roots * float(torch.linalg.vector_norm(roots))).any()):
        return "is not symmetric"
    if _smallest_ritz_value(G, x, image, scale) >= -allowed:
        return ""
    # For a matrix of low rank the iteration soon sees only rounding, so no upload is refused for that alone.
    smallest = float(torch.linalg.eigvalsh((G.double() + G.double().T) / (2 * scale))[0])
    return f"has an eigenvalue of {unit * smallest:.3g}" if smallest < -allowed else ""


def _smallest_ritz_value(G: torch.Tensor, x: torch.Tensor, image: torch.Tensor, scale: float) -> float:
    """The smallest Ritz value of G / scale in six Lanczos steps.

    Args:
        G: (M, M).
        x: (M,) of length 1, where they begin.
        image: (M,) its image G x / scale; it is overwritten.
    """
    before, beside = torch.zeros_like(x), 0.0
    T = np.zeros((_STEPS, _STEPS))
    for step in range(_STEPS):
        T[step, step] = own = float(x @ image)
        image.sub_(x, alpha=own).sub_(before, alpha=beside)
        before, beside = x, float(torch.linalg.vector_norm(image))
        if step + 1 == _STEPS or beside <= _INVARIANT:
            break
        T[step, step + 1] = T[step + 1, step] = beside
        x = image / beside
        image = (G @ x).div_(scale)
    return float(np.linalg.eigvalsh(T[: step + 1, : step + 1])[0])


@lru_cache(maxsize=8)
def _direction(rows: int) -> torch.Tensor:
    """(rows,) of length 1, random but always the same."""
    drawn = torch.randn(rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    return drawn / torch.linalg.vector_norm(drawn)


def noise_room(deviation: float, rows: int) -> float:
    """An upper bound, almost certainly, of the spectral norm of the noise in one Gram matrix (rows, rows)."""
    return deviation * (math.sqrt(2 * rows) + NOISE_BOUND)


def noisy_gram_trouble(G: torch.Tensor, rounding: float, deviation: float, proven: bool = False) -> str:
    """Why G (M, M) is no Gram matrix with noise of this standard deviation on its diagonal; "": nothing was found."""
    shifted = G.clone()
    shifted.diagonal().add_(noise_room(deviation, len(G)))
    return gram_trouble(shifted, rounding, proven)


def longer_trouble(sums: torch.Tensor, square: bool, most: float, deviation: float, rounding: float) -> str:
    """Why these are no sums over so many samples whose features are no longer than some length; "": nothing was found.

    Args:
        sums: a Gram matrix (M, M) if `square`, else sums with a column for each class (M, c).
        most: the largest trace of the matrix, or the most that the columns are long together, before noise.
        deviation: the standard deviation of the noise in the numbers, on the diagonal of a Gram matrix; 0: none.
        rounding: relative error of the numbers.
    """
    rows = math.sqrt(len(sums))
    if square:
        what, size = "the trace", float(sums.diagonal().sum(dtype=torch.float64))
        most += NOISE_BOUND * deviation * rows
    else:
        lengths = torch.linalg.vector_norm(sums, dim=0, dtype=torch.float64)
        what, size = "columns of together the length", float(lengths.sum())
        most += len(lengths) * deviation * (rows + NOISE_BOUND)
    return f"has {what} {size:.4g}, more than {most:.4g}" if size > (1 + _SLACK * rounding) * most else ""


def packed_grams_trouble(columns: torch.Tensor, rounding: float, proven: bool = False) -> str:
    """Why a column of `columns` (d (d + 1) / 2, k) is no Gram matrix, its upper triangle by rows; "": none is found."""
    for number, entries in enumerate(columns.T):
        if trouble := gram_trouble(symmetric(entries), rounding, proven):
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
        trace: tr(G), of all samples together.
        samples: n (c,), or one number that no n_c exceeds.
        what: the name of G.
    """
    squares = sums.double().square().sum(dim=0)
    if isinstance(samples, torch.Tensor):
        held = samples > 0
        squares, samples = squares[held], samples[held].to(squares)
    total = float((squares / samples).sum())
    allowed = (1 + 4 * _SLACK * rounding) * trace
    return f"is larger than {what} allows: {total:.4g} where tr {what} is {trace:.4g}" if total > allowed else ""
