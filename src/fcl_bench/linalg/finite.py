"""Whether numbers are finite."""

from __future__ import annotations

from cmath import isfinite

import torch

#: Tensor size up to which copying takes less time than a separate sum.
_SMALL = 4096


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether all values of all these tensors are finite."""
    # A sum is infinite or NaN if one of its terms is, and takes a twentieth of the time of testing each term. A sum of
    # finite terms may overflow too, so each term is tested if the sum is not finite.
    if tensors and all(tensor.is_cuda and tensor.is_floating_point() for tensor in tensors):
        # On a GPU each kernel takes as long as a small tensor: the norms of all tensors are a few of them.
        together = torch.stack(torch._foreach_norm(list(tensors))).sum()
        return bool(torch.isfinite(together)) or all(bool(torch.isfinite(own).all()) for own in tensors)
    small: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        # Most tensors of a network are short vectors. A client may have made one or two of them on the CPU, and tensors
        # on two devices can't be concatenated, but their sums can be added.
        if tensor.numel() <= _SMALL and tensor.device == tensors[0].device:
            small.append(tensor.flatten())
        else:
            sums.append(tensor.sum())
    if small:
        sums.append((torch.cat(small) if len(small) > 1 else small[0]).sum())
    total = sum(sums[1:], start=sums[0]).item() if sums else 0
    return isfinite(total) or all(bool(torch.isfinite(own).all()) for own in tensors)
