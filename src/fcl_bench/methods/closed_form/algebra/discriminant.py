"""Linear discriminants from sums: the within-class covariance, its shrinkage, and the linear system that uses it."""

from __future__ import annotations

import torch

from fcl_bench.linalg.gram import add_gram
from fcl_bench.linalg.solve import Solution, solve_symmetric

#: A negative eigenvalue larger than this many relative roundings of the sums is not a rounding error.
_SLACK = 4


def within_scatter(G: torch.Tensor, S: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """sum_c sum_(i in c) (h_i - mu_c)(h_i - mu_c)' = G - S diag(1/n) S' (M, M), in float64.

    The right-hand side cancels if the class means are far larger than the spread: in double precision half of the
    digits are lost if they are 10^4 times larger. The result is the same for H minus any common offset.

    Args:
        G: (M, M) H'H.
        S: (M, C) the class sums of H.
        n: (C,) the samples of each class.
    """
    scatter = G.to(torch.float64, copy=True)
    held = n > 0
    return add_gram(scatter, (S[:, held].to(scatter) / n[held].to(scatter).sqrt()).T, -1)


def contradiction(scatter: torch.Tensor, noise: float) -> str:
    """An error text if the scatter matrix has an eigenvalue below zero by more than rounding; "" otherwise.

    Args:
        scatter: (M, M) as `within_scatter` made it.
        noise: its absolute error, in the Frobenius norm (`noise_of`).
    """
    if noise == 0:
        return ""
    shifted = scatter.clone()
    shifted.diagonal().add_(_SLACK * noise)
    if not bool(torch.linalg.cholesky_ex(shifted)[1]):
        return ""
    smallest = float(torch.linalg.eigvalsh(scatter)[0])
    return (
        f"the within-class scatter is indefinite: smallest eigenvalue {smallest:.3g}, where rounding explains"
        f" {-_SLACK * noise:.3g}; the G, S and n that came contradict each other"
    )


def oas_share(trace: float, squared: float, size: int, samples: int) -> float:
    """The share of the identity in the oracle-approximating shrinkage estimator (Chen et al. 2010, Eq. 23), at most 1.

    Args:
        trace, squared: tr Sigma and tr Sigma^2 of the sample covariance.
        size: M.
        samples: N.
    """
    spread = squared - trace**2 / size
    numerator = (1 - 2 / size) * squared + trace**2
    denominator = (samples + 1 - 2 / size) * spread
    return 1.0 if numerator >= denominator else numerator / denominator


def solve_discriminant(
    Sigma: torch.Tensor, means: torch.Tensor, share: float, level: float, noise: float = 0.0
) -> Solution:
    """W = ((1 - share) Sigma + share level I)^-1 means (M, C).

    Args:
        Sigma: (M, M) within-class covariance; overwritten.
        means: (M, C).
        share: the share of the multiple of the identity, 0 to 1.
        level: the factor of the identity.
        noise: absolute error of Sigma, in the Frobenius norm; `noise_of` has it for a difference of sums.
    """
    Sigma.mul_(1 - share)
    shift = share * level
    # The solver takes errors relative to its entries, which are far smaller than the entries that were rounded.
    size = max(float(torch.linalg.matrix_norm(Sigma)), shift)
    rounding = min((1 - share) * noise / size, 1.0) if size else 0.0
    return solve_symmetric(Sigma, means, rounding, shift)


def noise_of(G: torch.Tensor, rounding: float, before: float = 0.0) -> float:
    """The absolute error, in the Frobenius norm, of a matrix that is a difference of terms of the size of G.

    Args:
        G: (M, M).
        rounding: relative error of its entries; see `linalg.solve.relative_rounding`.
        before: the norm of a matrix, rounded alike, that G was made of by a difference; 0: there is none.
    """
    size = before + float(torch.linalg.matrix_norm(G.to(torch.float64)))
    return (rounding + len(G) * torch.finfo(torch.float64).eps) * size
