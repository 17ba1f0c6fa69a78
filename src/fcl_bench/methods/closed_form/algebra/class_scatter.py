"""Covariances of single classes, from the leading directions of each class at each client."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import torch

from fcl_bench.methods.closed_form.algebra.random_features import OwnCovariances
from fcl_bench.methods.closed_form.algebra.remainder import leading


def class_sketches(
    A: torch.Tensor, which: torch.Tensor, classes: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The leading directions of each class of A (n, d), the deviations of samples of the classes `which` (n,).

    Returns:
        U (d, k) unit columns, class by class, at most `rank` of each; lengths (k,), their singular values; widths (c,)
        int32, how many columns each class has; and energies (c,), the sums of the squares of all deviations.
    """
    found = [leading(A[which == c], rank) for c in range(classes)]
    widths = torch.tensor([len(sketch.sigma) for sketch in found], dtype=torch.int32, device=A.device)
    energies = A.new_zeros(classes).index_add_(0, which, A.square().sum(dim=1))
    U, lengths = (torch.cat(parts, dim=-1) for parts in zip(*found, strict=True))
    return U, lengths, widths, energies


class ClassScatter:
    """What the uploads of a task say of the scatter of each class about its means.

    Args:
        like: (d, d), of the type and on the device that is wanted.
        classes: how many the task has.
    """

    def __init__(self, like: torch.Tensor, classes: int) -> None:
        self._known = like.new_zeros(classes, *like.shape)
        self._energies = like.new_zeros(classes)

    def add(self, factors: torch.Tensor, widths: torch.Tensor, energies: torch.Tensor) -> None:
        """Add an upload: U lengths (d, k), how many columns each class has (c,), and all its energy (c,)."""
        classes = torch.arange(len(widths), device=widths.device).repeat_interleave(widths)
        first = widths.cumsum(0) - widths
        position = torch.arange(len(classes), device=widths.device) - first[classes]
        padded = factors.new_zeros(len(widths), int(widths.max()), len(factors))
        padded[classes, position] = factors.T
        self._known.baddbmm_(padded.mT, padded)
        self._energies += energies

    def beside(self, Sigma: torch.Tensor, sizes: torch.Tensor, rank: int) -> OwnCovariances:
        """b_c and L_c with Sigma_c = b_c Sigma + L_c L_c': what is known of a class beyond the common shape.

        V diag(w) V' are the `rank` leading pairs of what is known of the class, e its energy, n its samples. The rest
        of its energy has the common shape, outside V. Where w exceeds that shape, the difference is the class's own:

            beta = max(e - sum w, 0) / (tr Sigma - tr V' Sigma V)
            b = beta / n,  L = V diag((w - beta v' Sigma v)_+ / n)^(1/2)

        Args:
            Sigma: (d, d) of all classes.
            sizes: (c,) n_c.
        """
        values, vectors = (part.to(Sigma) for part in _eigenpairs(self._known.double()))
        first = len(Sigma) - rank
        w, V = values[:, first:].clamp_min(0), vectors[:, :, first:]
        # Where fewer directions are known than `rank`, the others are arbitrary.
        known = w > len(Sigma) * torch.finfo(w.dtype).eps * w.amax(dim=1, keepdim=True) if rank else w > 0
        common = ((Sigma @ V) * V).sum(dim=1) * known
        left = Sigma.trace() - common.sum(dim=1)
        dropped = (self._energies - w.sum(dim=1)).clamp_min(0)
        # Rounding, if V holds all of Sigma: then nothing is dropped either.
        rest = left > len(Sigma) * torch.finfo(Sigma.dtype).eps * Sigma.trace()
        beta = torch.where(rest, dropped / left, 0)
        n = sizes.to(Sigma).clamp_min(1)
        excess = (w - beta.unsqueeze(1) * common).clamp_min(0)
        return OwnCovariances(beta / n, V * (excess / n.unsqueeze(1)).sqrt().unsqueeze(1))


def _eigenpairs(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues (c, d), ascending, and eigenvectors (c, d, d) of symmetric matrices in float64."""
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:
        # Divide and conquer fails on some matrices of few directions; the slower QR iteration does not.
        pairs = [scipy.linalg.eigh(matrix, driver="ev") for matrix in matrices.cpu().numpy()]
        values, vectors = (torch.from_numpy(np.stack(parts)).to(matrices) for parts in zip(*pairs, strict=True))
    return values, vectors
