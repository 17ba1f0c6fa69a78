"""A task's Gram matrix estimated from the class sums of many groups of samples (STSA Eq. 9)."""

from __future__ import annotations

import torch

from fcl_bench.linalg.gram import add_gram


class ClassScatter:
    """Adds groups as they arrive and estimates, per class i over the groups j so far,

        G_i = (n_i - 1) / (K_i - 1) sum_j C_j C_j' / n_j  -  (n_i - K_i) / (n_i (K_i - 1)) S S',

    with S = sum_j C_j and n_i = sum_j n_j (Eq. 9). K_i is the number of groups that hold class i: the proof counts one
    covariance term for each group in the sum. The paper prints K, the number of all groups.

    Both weights depend on the whole task, so the rows C_j' / sqrt(n_j) of the groups that hold a class are stored until
    it ends; there are no more of them than samples in the task. If they are more than M per class, the M x M products
    of the classes are stored instead. The estimate is two symmetric products.

    Args:
        like: (c, M) a tensor with the shape, type and device of the sums.

    Attributes:
        sums: (c, M) the class sums of all groups, S' in each row.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.sums = torch.zeros_like(like)
        self._size = like.new_zeros(len(like))
        self._holding = like.new_zeros(len(like))
        self._groups = self._kept = 0
        self._rows: list[torch.Tensor] = []
        self._classes: list[torch.Tensor] = []
        self._products: torch.Tensor | None = None

    def add(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add groups with class sums `sums` (groups, c, M) and class counts `counts` (groups, c)."""
        held = counts > 0
        self.sums += sums.sum(dim=0)
        self._size += counts.sum(dim=0)
        self._holding += held.sum(dim=0)
        self._groups += len(counts)
        self._rows.append(sums[held].div_(counts[held].to(sums).sqrt().unsqueeze(1)))
        self._classes.append(torch.nonzero(held)[:, 1])
        self._kept += len(self._classes[-1])
        if self._kept >= self.sums.numel():
            self._fold()

    def _fold(self) -> None:
        """Replace the rows kept so far by their products, class by class."""
        rows, classes = torch.cat(self._rows), torch.cat(self._classes)
        if self._products is None:
            c, M = self.sums.shape
            self._products = rows.new_zeros(c, M, M)
        for number, product in enumerate(self._products):
            add_gram(product, rows[classes == number])
        self._rows, self._classes, self._kept = [], [], 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything, as tensors for `restored`."""
        rows = {"rows": torch.cat(self._rows), "classes": torch.cat(self._classes)} if self._rows else {}
        products = {} if self._products is None else {"products": self._products}
        counted = {"size": self._size, "holding": self._holding, "groups": torch.tensor(self._groups)}
        return {"sums": self.sums, **counted, **rows, **products}

    @classmethod
    def restored(cls, state: dict[str, torch.Tensor]) -> ClassScatter:
        """The object whose `state_dict` this is."""
        scatter = cls(state["sums"])
        scatter.sums, scatter._size, scatter._holding = (state[name].clone() for name in ("sums", "size", "holding"))
        scatter._groups = int(state["groups"])
        if "rows" in state:
            scatter._rows, scatter._classes = [state["rows"].clone()], [state["classes"].clone()]
            scatter._kept = len(state["classes"])
        scatter._products = state["products"].clone() if "products" in state else None
        return scatter

    def add_to(self, G: torch.Tensor, unbiased: bool, sign: int = 1) -> int:
        """G += the sum of the estimates over classes, or -= it.

        Args:
            G: (M, M), changed in place.
            sign: 1, or -1 to take out what was added before.
            unbiased: with K_i; otherwise as printed, with K for K_i and weights below zero set to zero (as in the
                paper's public code).

        Returns:
            the number of classes of which K (unbiased: K_i) is 1. Their covariance can't be estimated; their part of G
            is S S' / n_i.
        """
        n, K = self._size, self._holding if unbiased else torch.full_like(self._size, self._groups)
        several = K > 1
        degrees = (K - 1).clamp_min(1)
        first = torch.where(several, (n - 1) / degrees, 1.0).clamp_min(0)
        second = torch.where(several, (n - K) / (n.clamp_min(1) * degrees), 0.0).clamp_min(0)
        # A class has at least as many samples as groups that hold it, so only the printed form is ever clamped.
        held = n > 0
        first, second = first * held, second * held
        if self._products is not None:
            G += sign * torch.einsum("c,cij->ij", first, self._products)
        if self._rows:
            add_gram(G, torch.cat(self._rows).mul_(first.sqrt()[torch.cat(self._classes)].unsqueeze(1)), sign)
        add_gram(G, self.sums * second.sqrt().unsqueeze(1), -sign)
        return int((~several & held).sum())
