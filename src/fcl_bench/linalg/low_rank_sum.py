"""A growing sum F_1 F_1' + F_2 F_2' + ... kept as whichever is smaller, its factors or the matrix."""

from __future__ import annotations

import torch

from fcl_bench.linalg.gram import add_gram, gram
from fcl_bench.linalg.solve import Solution, relative_rounding, solve_symmetric


class LowRankSum:
    """G = F F' with F (M, m), until m would reach M; from then on G (M, M) itself.

    Args:
        size: M.
        dtype, device: of what is kept.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._blocks = [torch.zeros(size, 0, dtype=dtype, device=device)]
        self._dense: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """M."""
        return self._blocks[0].shape[0]

    def add(self, F: torch.Tensor) -> None:
        """G += F F' for F (M, m)."""
        if self._dense is not None:
            add_gram(self._dense, F.T)
            return
        self._blocks.append(F)
        if sum(block.shape[1] for block in self._blocks) >= self.size:
            F = self._factor()
            self._dense = gram(F.T)
            self._blocks = [F.new_zeros(self.size, 0)]

    def _factor(self) -> torch.Tensor:
        self._blocks = [torch.cat(self._blocks, dim=1)]
        return self._blocks[0]

    def dense(self) -> torch.Tensor:
        """G (M, M)."""
        if self._dense is not None:
            return self._dense
        return gram(self._factor().T)

    def solve(self, ridge: float, B: torch.Tensor) -> Solution:
        """W = (G + ridge I)^-1 B, in the span of F and B where that is much smaller than M.

        With Q an orthonormal basis of the span, W = Q (Q'F F'Q + ridge I)^-1 Q'B. (The Woodbury identity is the same in
        exact arithmetic, but it subtracts what it then divides by `ridge`: its error grows with the square of the
        condition number.)
        """
        if self._dense is None and 2 * (self._factor().shape[1] + B.shape[1]) <= self.size:
            F = self._factor()
            Q, R = torch.linalg.qr(torch.cat([F, B], dim=1))
            E = R[:, : F.shape[1]]
            inner = solve_symmetric(gram(E.T), R[:, F.shape[1] :], relative_rounding(B.dtype), shift=ridge)
            return Solution(Q @ inner.W, inner.condition, inner.trouble)
        return solve_symmetric(self.dense(), B, relative_rounding(B.dtype), shift=ridge)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`factor` (M, m), and `gram` (M, M) once it is kept."""
        state = {"factor": self._factor()}
        return state if self._dense is None else {**state, "gram": self._dense}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""
        like = self._blocks[0]
        self._blocks = [state["factor"].to(like)]
        self._dense = state["gram"].to(like) if "gram" in state else None
