"""The lines that need a GPU, in one command: scores that agree with the CPU's, rounds, extraction, statistics.

    python -m benchmarks gpu_lines                   # the first GPU
    python -m benchmarks gpu_lines --device cpu --quick

- the scores of every closed-form method with float64 statistics differ from the CPU's by less than 1e-6 of the largest;
- kernels run in 80 % of the wall time of FedAvg's rounds with ResNet-18 and 5 clients of 5,000 images (on the CPU, in
  its place: the rounds' images per second over those of the bare passes);
- extraction from encoded images reaches 90 % of the images per second of timm's network on ready batches, for ResNet-18
  and ViT-B/16, at the same batch and precision (float16);
- STSA's statistics (n 10,000, d 512, M 5,000) reach 60 % of the operations per second of the bare product H'H, in
  float32 and float64.

Exit code 1 if a line does not hold. On the CPU all is measured alike, but the bounds are not meant for it, so that
only the first one counts. Results are written after each part, should the command's time end before it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

# As the command does, before torch is imported: threads that spin would take the cores from those that decode.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import extraction_throughput
import torch
import training_throughput
from report import write
from suite import made
from suite.bench_methods import METHODS, learned
from suite.bench_statistics import sides_of
from suite.results import Timed, rate_ratio
from suite.sides import time_in_turn

from fcl_bench import environment
from fcl_bench.errors import UserError

EXTRACTION, STATISTICS, AGREEMENT, KERNELS = 0.9, 0.6, 1e-6, 0.8


@dataclass(frozen=True)
class Measured:
    """A line and its measurement; `at_least` says on which side of the bound it has to be."""

    what: str
    value: float
    bound: float
    at_least: bool

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def extraction(device: torch.device, out: Path, quick: bool) -> list[Measured]:
    """Of timm's rate; the images are CIFAR-100's size, since a GPU waits for the decoder of large ones."""
    lines = []
    for backbone, samples in (("resnet18", 8192), ("vit_b16", 4096)):
        options = extraction_throughput.parse(
            ["--device", str(device), "--backbone", backbone, "--images", "webp32", "--out", str(out)]
            + ["--samples", "8" if quick else str(samples)]
            + (["--repeats", "2"] if quick else [])
        )
        rate = extraction_throughput.measure(options, device)["ratio_median"]
        lines.append(Measured(f"extraction, {backbone}, of timm's rate", rate, EXTRACTION, True))
    return lines


def rounds(device: torch.device, out: Path, quick: bool) -> list[Measured]:
    """Of the wall time; the kernels' own share can only be seen on CUDA."""
    sizes = (
        ["--backbone", "tiny", "--samples", "40"] if quick else ["--backbone", "resnet18_cifar", "--samples", "25000"]
    )
    options = training_throughput.parse(["--repeats", "2" if quick else "3", "--out", str(out), *sizes])
    found = training_throughput.measure(options, device)
    if device.type == "cuda":
        return [Measured("kernels' share of rounds' wall time, resnet18_cifar", found["kernel_share"], KERNELS, True)]
    return [Measured("rounds, of bare passes' rate", found["ratio_median"], KERNELS, True)]


def statistics(device: torch.device, quick: bool) -> list[Measured]:
    lines = []
    n, d, M = (500, 64, 256) if quick else (10_000, 512, 5_000)
    for dtype in (torch.float32, torch.float64):
        ours, limit, _ = sides_of(SimpleNamespace(n=n, d=d, M=M, C=10, dtype=dtype), device)
        time_in_turn((ours, limit), device)
        rate = rate_ratio(*(Timed.of(side) for side in (ours, limit)))
        assert rate is not None
        name = str(dtype).removeprefix("torch.")
        lines.append(Measured(f"statistics, n {n}, d {d}, M {M}, {name}, of H'H's rate", rate, STATISTICS, True))
    return lines


def agreement(device: torch.device, quick: bool) -> list[Measured]:
    """Largest difference of scores over the largest score, each method against itself on the CPU."""
    sizes = (
        {"n": 40, "d": 16, "M": 64, "r": 16, "K": 3, "C": 5}
        if quick
        else {"n": 500, "d": 512, "M": 2048, "r": 512, "K": 5, "C": 10}
    )
    case = SimpleNamespace(**sizes)
    tests = made.features(200, case.d, case.C, torch.float64, seed=10_000)
    lines = []
    for name, make in METHODS.items():
        scores = []
        for place in (made.CPU, device):
            known = made.context(case.d, torch.float64, place)
            shards = [
                made.client_data(case.n, case.d, case.C, torch.float64, place, client) for client in range(case.K)
            ]
            scores.append(learned(make(case), known, shards, case.C).predict(tests.to(place)).cpu())
        difference = float((scores[1] - scores[0]).abs().max() / scores[0].abs().max())
        lines.append(Measured(f"scores, {name}, CPU and {device.type}", difference, AGREEMENT, False))
    return lines


def markdown(lines: list[Measured]) -> str:
    rows = [("line", "bound", "measured", "holds"), ("---",) * 4]
    for line in lines:
        sign = "≥" if line.at_least else "≤"
        rows.append((line.what, f"{sign} {line.bound:g}", f"{line.value:.3g}", "yes" if line.holds else "**no**"))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; cpu to try the script")
    parser.add_argument("--quick", action="store_true", help="small sizes: to try the script, not to measure")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    options = parser.parse_args(arguments)
    try:
        device = environment.choose_device(options.device)
    except UserError as error:
        print(f"gpu_lines: error: {error}", file=sys.stderr)
        return 2
    parts: list[Callable[[], list[Measured]]] = [
        lambda: agreement(device, options.quick),
        lambda: rounds(device, options.out, options.quick),
        lambda: extraction(device, options.out, options.quick),
        lambda: statistics(device, options.quick),
    ]
    machine, lines = environment.describe(device), list[Measured]()
    file = options.out / f"gpu-lines-{device.type}.json"
    for part in parts:
        lines += part()
        told = [{**vars(line), "holds": line.holds} for line in lines]
        write(file, told, f"{machine['device']}, torch {machine['torch']}\n\n{markdown(lines)}", environment=machine)
    print(f"{machine['device']}, torch {machine['torch']}\n\n{markdown(lines)}written: {file}")
    counted = lines if device.type == "cuda" else [line for line in lines if not line.at_least]
    return int(not all(line.holds for line in counted))


if __name__ == "__main__":
    sys.exit(main())
