"""AFL's absolute aggregation law as printed: clients join one by one, and each matrix is inverted."""

from __future__ import annotations

import torch


class PairwiseLaw:
    """W_agg of the clients so far by Eq. 9-11 of AFL, with the sign that holds (docs/errata/afl.md, 1).

    With C = C_agg + C_k, the weight of W_agg is I - C_agg^-1 C_k (I - C^-1 C_k), and that of W_k the same with C_agg
    and C_k interchanged. In exact arithmetic and for invertible matrices these are C^-1 C_agg and C^-1 C_k, so that
    C W is the running sum of all C_k W_k. A C_k that is singular but for rounding has an inverse made of rounding
    errors, and the differences above no longer cancel.

    A matrix whose elimination meets an exact zero has no inverse; its Moore-Penrose inverse stands in (as in Eq. 4).

    Args:
        size: d.
        dtype, device: of the whole computation.
        rounding: relative error of the entries of each C_k; at least that of `dtype` is assumed.

    Attributes:
        W: (d, C).
        inverted: how many matrices were inverted.
        singular: how many of them are singular to rounding: their condition number is above 1 / rounding.
        condition: the largest of their condition numbers, in the 1-norm.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, rounding: float = 0.0) -> None:
        self.W = torch.zeros(size, 0, dtype=dtype, device=device)
        self.inverted = 0
        self.singular = 0
        self.condition = 1.0
        self._limit = 1 / max(rounding, torch.finfo(dtype).eps)
        #: C_agg^-1; None: not computed.
        self._R: torch.Tensor | None = None

    def add(self, C_agg: torch.Tensor, C: torch.Tensor, W: torch.Tensor) -> None:
        """One more client. The first one is taken unchanged: Alg. 1 would invert it with C_agg = 0.

        Args:
            C_agg: (d, d) sum over the clients so far.
            C, W: (d, d) and (d, C) of this one.
        """
        R = self._counted_inverse(C)
        if self.inverted == 1:
            self.W, self._R = W, R
            return
        R_agg = inverse(C_agg)[0] if self._R is None else self._R
        self._R = self._counted_inverse(C_agg + C)
        # Multiplied from the right, so that each product has only the few columns of W.
        own, other = C @ self.W, C_agg @ W
        self.W = self.W - R_agg @ (own - C @ (self._R @ own)) + W - R @ (other - C_agg @ (self._R @ other))

    def widen(self, classes: int) -> None:
        """Columns of zeros for classes that no client so far has."""
        self.W = torch.nn.functional.pad(self.W, (0, classes - self.W.shape[1]))

    def _counted_inverse(self, A: torch.Tensor) -> torch.Tensor:
        R, condition = inverse(A)
        self.inverted += 1
        self.singular += condition >= self._limit
        self.condition = max(self.condition, condition)
        return R

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state for `load_state_dict`."""
        counts = [self.inverted, self.singular, self.condition]
        return {"W": self.W, "counts": torch.tensor(counts, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the state that `state_dict` returned; C_agg is inverted again for the next client."""
        self.W, self._R = state["W"].to(self.W), None
        inverted, singular, self.condition = state["counts"].tolist()
        self.inverted, self.singular = int(inverted), int(singular)


def inverse(A: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A^-1 (d, d) by elimination, and the condition number of A in the 1-norm.

    If an exact zero ends the elimination, the results are the Moore-Penrose inverse of a symmetric A and the largest
    condition number that its type resolves.
    """
    R, failed = torch.linalg.inv_ex(A)
    if bool(failed):
        return torch.linalg.pinv(A, hermitian=True), 1 / torch.finfo(A.dtype).eps
    return R, float(torch.linalg.matrix_norm(A, 1) * torch.linalg.matrix_norm(R, 1))
