"""Sums whose order is up to the threads: they give other bits each time, but only with several threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def refuse_sums_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `tensor[indices]` fails where it has a gradient and takes a place twice.

    On a CPU with several threads each of them adds to that place's gradient as soon as it can. Those of `embedding` and
    `index_select` add in the order of the indices.
    """
    take = torch.Tensor.__getitem__

    def checked(self: torch.Tensor, index: Any) -> torch.Tensor:
        if self.requires_grad and torch.is_grad_enabled():
            items = index if isinstance(index, tuple) else (index,)
            given = [torch.as_tensor(item) for item in items if isinstance(item, (torch.Tensor, np.ndarray, list))]
            if places := [item for item in given if item.dtype != torch.bool]:
                rows = torch.stack(torch.broadcast_tensors(*places), dim=-1).reshape(-1, len(places))
                assert len(rows.unique(dim=0)) == len(rows), f"places taken twice of {tuple(self.shape)}"
        return take(self, index)

    monkeypatch.setattr(torch.Tensor, "__getitem__", checked)
