"""FedRAN's merge of a task's clients beside its two dominant factorisations, in the paper's form and in ours."""

from __future__ import annotations

import torch

from fcl_bench.linalg.spectral import Spectrum
from fcl_bench.methods.closed_form.algebra.merging import Merger
from suite import made, peers
from suite.lines import GRAM_MERGE, PAPERS_MERGE
from suite.sides import Beside, each, limit, ours, peer, sizes


def merged(spectra: list[Spectrum], rank: int) -> Spectrum:
    """As the server does it: one after the other, as they arrive."""
    merger = Merger(rank)
    for one in spectra:
        merger.add(one)
    return merger.result()


@sizes(
    smoke=[{"M": 96, "r": 16, "K": 3, "dtype": "float64"}],
    quick=[{"M": 2048, "r": 256, "K": 3, "dtype": dtype} for dtype in ("float32", "float64")],
    full=[{"M": 8192, "r": 1024, "K": 5, "dtype": "float64"}],
)
def bench_merge(case, beside: Beside, device) -> None:
    spectra = made.spectra(case.K, case.M, case.r, case.dtype, device)
    A = torch.cat([V * sigma for V, sigma in spectra[:2]], dim=1)
    # All K - 1 merges have the same sizes, so the other sides do one of them.
    share = 1 / (case.K - 1)

    def qr_svd() -> None:
        _, R = torch.linalg.qr(A)
        torch.linalg.svd(R)

    beside(
        ours("Merger", each(lambda: merged(spectra, case.r))),
        limit(PAPERS_MERGE, each(qr_svd), share=share),
        limit(GRAM_MERGE, each(lambda: torch.linalg.eigh(A.T.double() @ A.double())), share=share),
        peer("QR, SVD, Q U", each(lambda: peers.merge(spectra[0], spectra[1], case.r)), share=share),
    )
