"""What it costs to check a client's Gram matrix: the proof, the cheap look, and one Cholesky factorisation beside them.

.venv/bin/python -m benchmarks gram_checks 512 2048
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from fcl_bench.linalg.structure import gram_trouble

_TRIES = 5


def milliseconds(work: Callable[[], object]) -> float:
    """Processor milliseconds of the fastest of some tries."""

    def once() -> float:
        begin = time.process_time()
        work()
        return 1000 * (time.process_time() - begin)

    return min(once() for _ in range(_TRIES))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("M", type=int, nargs="*", default=[512, 2048])
    torch.set_num_threads(1)
    rounding = torch.finfo(torch.float32).eps
    print("| M | proof (ms) | look (ms) | Cholesky (ms) |", "|---:|---:|---:|---:|", sep="\n")
    for M in parser.parse_args(arguments).M:
        H = torch.randn(4 * M, M, dtype=torch.float64)
        G = H.T @ H
        jobs = (
            lambda G=G: gram_trouble(G, rounding, proven=True),
            lambda G=G: gram_trouble(G, rounding),
            lambda G=G: torch.linalg.cholesky(G),
        )
        print(f"| {M} |", " | ".join(f"{milliseconds(job):.1f}" for job in jobs), "|")


if __name__ == "__main__":
    main()
