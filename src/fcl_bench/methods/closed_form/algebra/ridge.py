"""Choose a ridge from the statistics alone: a share of the mean eigenvalue, or generalised cross-validation.

`score_scales` makes every class's scores comparable in size, from the sums with which the classifier was solved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Values of a ridge knob besides numbers.
AUTO, GCV = "auto", "gcv"
#: The share of the Gram matrix's mean eigenvalue that `auto` takes.
SHARE = 0.01
#: Candidates of `gcv`: powers of ten times the mean eigenvalue, four to a decade.
_LOWEST, _HIGHEST, _PER_DECADE = -8, 4, 4
#: The smallest number of residual degrees of freedom, as a share of the samples; fewer are rounding.
_LEFT = 1e-9
#: A residual this small, as a share of the samples, is rounding.
_ROUNDING = 2.0**-44


class Spectrum(NamedTuple):
    """A Gram matrix G (M, M) and class sums B (M, C) in G's eigenvectors u_i.

    Attributes:
        values: (m,) eigenvalues l_i.
        energies: (m,) sum_c (u_i'B_c)^2; of an eigenvalue that stands for several, their sum.
        multiplicity: (m,) how many eigenvalues each stands for.
    """

    values: torch.Tensor
    energies: torch.Tensor
    multiplicity: torch.Tensor

    @property
    def mean(self) -> float:
        """The mean of all eigenvalues, tr(G) / M."""
        return float(self.values @ self.multiplicity / self.multiplicity.sum())

    def with_rest(self, value: float, energy: float, count: int) -> Spectrum:
        """With `count` further eigenvalues `value`, whose eigenvectors hold `energy` of B."""
        more = (torch.tensor([float(one)]).to(self.values) for one in (value, max(energy, 0.0), count))
        return Spectrum(*(torch.cat([mine, one]) for mine, one in zip(self, more, strict=True))) if count else self

    def shifted(self, offset: float) -> Spectrum:
        """The spectrum of G + offset I. A value below zero is then rounding, and counts as 0."""
        return self._replace(values=(self.values + offset).clamp_min(0))


def mean_share(trace: float, size: int) -> float:
    """1 % of the mean eigenvalue of a Gram matrix with this trace and `size` rows; at least the smallest number."""
    return max(SHARE * trace / size, torch.finfo(torch.float64).tiny)


def residual_sums(spectrum: Spectrum, squares: float, ridges: torch.Tensor) -> torch.Tensor:
    """(k,) RSS = |Y|^2 - 2 tr(W'B) + tr(W'G W) of W = (G + ridge I)^-1 B for each ridge, exact for one-hot labels.

    The RSS of the first ridge is a difference of large numbers. What each further ridge adds to it is a sum of positive
    terms, exact however small, so a perfect fit can be told from an almost perfect one.

    Args:
        spectrum: of G and B, in float64.
        squares: |Y|^2, the sum of the squared labels; N for one-hot labels.
        ridges: (k,) ascending.
    """
    values, energy, _ = spectrum
    first, ridge = ridges[0], ridges.unsqueeze(1)
    inverse = _inverse(values + first)
    start = squares - float((energy * (values + 2 * first) * inverse.square()).sum())
    if abs(start) < _ROUNDING * squares:
        start = _ROUNDING * squares
    growth = values * (first + ridge) + 2 * first * ridge
    return start + ((ridge - first) * energy * growth * (inverse * _inverse(values + ridge)).square()).sum(dim=1)


def _inverse(values: torch.Tensor) -> torch.Tensor:
    """1 / values, and 0 where a value is not positive."""
    return torch.where(values > 0, 1 / values, torch.zeros_like(values))


def gcv(
    spectrum: Spectrum, samples: int, candidates: torch.Tensor | None = None, squares: float | None = None
) -> float | None:
    """The ridge with the least generalised cross-validation score N RSS / (N - df)^2 (Golub, Heath and Wahba 1979).

    With W = (G + ridge I)^-1 B and one-hot labels, RSS = N - 2 tr(W'B) + tr(W'G W) and df = sum_i l_i / (l_i + ridge),
    so the sums give both exactly.

    Args:
        spectrum: of G and B.
        samples: N.
        candidates: (k,) ridges to choose from, ascending; None: 1e-8 to 1e4 times the mean eigenvalue, four to a
            decade.
        squares: the sum of the squared labels; None: N. If G and B weigh samples, this sum must too.

    Returns:
        one of the candidates; None if no candidate leaves a residual and degrees of freedom, which may happen if G is
        an estimate that does not fit B.
    """
    spectrum = Spectrum(*(part.to(torch.float64) for part in spectrum))
    values, _, count = spectrum
    if candidates is None:
        steps = torch.arange(_LOWEST * _PER_DECADE, _HIGHEST * _PER_DECADE + 1, dtype=torch.float64) / _PER_DECADE
        candidates = 10.0 ** steps.to(values) * spectrum.mean
    candidates = candidates.to(values)
    residual = residual_sums(spectrum, samples if squares is None else squares, candidates)
    left = samples - (count * values * _inverse(values + candidates.unsqueeze(1))).sum(dim=1)
    usable = (residual > 0) & (left > _LEFT * samples)
    score = torch.where(usable, samples * residual / left.square(), torch.full_like(left, torch.inf))
    return float(candidates[int(score.argmin())]) if bool(usable.any()) else None


def score_scales(own: torch.Tensor) -> torch.Tensor:
    """(C,) the factor of each class's scores: 1 / sqrt(own_c), and 1 where own_c is not positive.

    Args:
        own: (C,) the sum of each class's scores over its own samples, B_c'w_c = n_c q_c.
    """
    positive = own > 0
    return torch.where(positive, torch.where(positive, own, torch.ones_like(own)).rsqrt(), torch.ones_like(own))


def unit_lengths(W: torch.Tensor) -> torch.Tensor:
    """(C,) the factor of each class's scores that gives its column of W (M, C) the length 1; 1 for a zero column."""
    length = W.norm(dim=0)
    return torch.where(length > 0, length, torch.ones_like(length)).reciprocal()
