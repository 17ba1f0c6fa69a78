"""What a server knows of clients whose uploads only add up, as under secure aggregation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fcl_bench.linalg.spectral import Spectrum
from sketches.local import Deviations, Local

Tensor = torch.Tensor


def added_up(clients: Sequence[Local], total: Sequence[Tensor], s: int, s_inputs: int) -> Local:
    """What a server knows that sees sums over clients alone: A'A Omega for a shared random Omega, traces, class sums.

    A is centred by the sum's own class means, since H'H Omega is a sum and so is what the means take out of it. The
    sketch is Nystroem's, A'A Omega (Omega' A'A Omega)^-1 Omega' A'A.
    """

    def sketched(parts: Sequence[Deviations], s: int) -> Deviations:
        width = parts[0].A.shape[1]
        rng = torch.Generator().manual_seed(1)
        Omega = torch.randn(width, min(s, width), generator=rng, dtype=parts[0].A.dtype)
        Y = sum(part.A.T @ (part.A @ Omega) for part in parts)
        values, turn = torch.linalg.eigh(Omega.T @ Y)
        kept = values > values[-1] * 1e-12
        V, sigma, _ = torch.linalg.svd(Y @ (turn[:, kept] / values[kept].sqrt()), full_matrices=False)
        merged = Deviations(torch.cat([part.A for part in parts]), s)
        merged.top = Spectrum(V, sigma)
        return merged

    S, S_z, n = total
    hidden, inputs = sketched([one.hidden for one in clients], s), sketched([one.inputs for one in clients], s_inputs)
    means = S_z / n.clamp_min(1)
    return Local(torch.cat([one.which for one in clients]), n, S, S_z, hidden, inputs, means, n, torch.arange(len(n)))
