"""What `backbone.compile=true` and `cudnn=autotuned` bring: networks as they are beside compiled and autotuned ones.

    python -m benchmarks network_choices --device cuda
    python -m benchmarks network_choices --device cpu --backbone tiny

The sides take turns: frozen forward passes as extraction makes them (float16 on CUDA), and steps of a client as a round
makes them (bfloat16 on CUDA), on images that are ready on the device. A GPU is told in seconds of the wall, a CPU in
processor seconds. What the first pass takes stands apart: it compiles, or tries cuDNN's algorithms. Beside it stands by
how much features and trained weights differ from those of the network as it is, relative to the largest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from report import write
from suite.sides import Side, peer, processor_seconds, synchronise, time_in_turn
from training_throughput import CLASSES, images_of

from fcl_bench import environment
from fcl_bench.backbones.backbone import Trainable
from fcl_bench.backbones.network_extractor import NetworkExtractor, require_compiler
from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.data.images.batches import Samples, Standardise
from fcl_bench.data.sources.base import Dataset
from fcl_bench.environment import choosing_kernels
from fcl_bench.errors import UserError
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import Trainer

AS_IT_IS = "as it is"
EXTRACTION, TRAINING = "extraction", "training"


def choices(device: torch.device) -> dict[str, tuple[bool, str]]:
    """The sides by name: whether the network is compiled, and `cudnn`. What this machine lacks is told and left out."""
    found = {AS_IT_IS: (False, "deterministic")}
    try:
        require_compiler(device)
        found["compiled"] = (True, "deterministic")
    except UserError as error:
        print(f"network_choices: not measured: {error}", file=sys.stderr)
    if device.type == "cuda":
        found["autotuned"] = (False, "autotuned")
        found |= {"compiled, autotuned": (True, "autotuned")} if "compiled" in found else {}
    return found


def start_of(backbone: str, data: Dataset) -> Trainable:
    """The network of a YAML in random weights."""
    more = [] if backbone == "tiny" else ["backbone.pretrained=false"]
    return load_settings(composed([f"backbone={backbone}", *more])).backbone.trainable(data, 0)


class Extracting:
    """Frozen forward passes over one batch, `batches` times."""

    def __init__(self, start: Trainable, device: torch.device, batch: int, batches: int) -> None:
        body, draws = start.build(), torch.Generator().manual_seed(0)
        for norm in body.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):  # those of a new network change nothing
                norm.running_mean.normal_(generator=draws)
                norm.running_var.uniform_(0.5, 2, generator=draws)
        self._extractor = NetworkExtractor(body, start, device)
        self._batches = batches
        self._images = torch.randn(batch, 3, start.size, start.size, generator=torch.Generator().manual_seed(0))
        self._images = self._images.to(device, memory_format=torch.channels_last)
        # As extraction reads its images, but without decoding them.
        self._extractor._images = lambda *_: iter([self._images] * self._batches)

    def __call__(self) -> torch.Tensor:
        """The features of the last batch."""
        *_, last = self._extractor.batches(None, 0)
        return last


class Stepping:
    """A client's steps over `batches` batches, always from the same weights."""

    def __init__(self, start: Trainable, device: torch.device, batch: int, batches: int) -> None:
        knobs = Training(epochs=1, batch_size=batch, augment="none")
        self._network: Network = Network(start).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._network.grow([CLASSES], 0)
        self._trainer = Trainer(knobs, Standardise(start.size, start.mean, start.std), device)
        draws, n = torch.Generator().manual_seed(0), batch * batches
        images = torch.randint(256, (n, 3, start.size, start.size), dtype=torch.uint8, generator=draws)
        self._samples = Samples(images.to(device), (torch.arange(n) % CLASSES).to(device))
        self._first = {name: value.clone() for name, value in self._network.state().items()}

    def __call__(self) -> torch.Tensor:
        """All that training changed."""
        self._network.load(self._first)
        return self._trainer.train(self._network, self._samples, 0.01, 0, Objective()).buffer


def measure(backbone: str, device: torch.device, batch: int, batches: int, rounds: int) -> dict[str, Any]:
    """Of each work and side: images per second, the first pass, how far the result is from that as it is."""
    start = start_of(backbone, images_of(CLASSES))
    found: dict[str, Any] = {}
    for kind, work in ((EXTRACTION, Extracting), (TRAINING, Stepping)):
        sides, told, expected = list[Side](), dict[str, dict[str, float]](), torch.empty(0)
        for name, (compiled, cudnn) in choices(device).items():
            torch.manual_seed(0)
            with choosing_kernels(cudnn):
                doing = work(replace(start, compiled=compiled), device, batch, batches)

            def prepared(doing: Any = doing, cudnn: str = cudnn) -> Any:
                def run() -> torch.Tensor:
                    with choosing_kernels(cudnn):
                        return doing()

                return run

            synchronise(device)
            begin, result = processor_seconds(), prepared()()
            synchronise(device)
            expected = result if name == AS_IT_IS else expected
            apart = float((result.double() - expected.double()).abs().max() / expected.double().abs().max())
            told[name] = {"first_processor_seconds": processor_seconds() - begin, "difference": apart}
            sides.append(peer(name, prepared))
        time_in_turn(sides, device, rounds)
        seconds = [side.seconds if device.type == "cuda" else side.processor for side in sides]
        for side, own in zip(sides, seconds, strict=True):
            gains = [first / mine for first, mine in zip(seconds[0], own, strict=True)]
            told[side.what] |= {
                "images_per_second": batch * batches / statistics.median(own),
                "gain": statistics.median(gains),
            }
        found[kind] = told
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown: a row for each side."""
    rows = [("work", "network", "images/s", "gain", "first pass, processor s", "difference"), ("---",) * 6]
    for kind, told in found.items():
        for name, own in told.items():
            numbers = (f"{own['images_per_second']:.0f}", f"{own['gain']:.2f}", f"{own['first_processor_seconds']:.1f}")
            rows.append((kind, name, *numbers, f"{own['difference']:.1e}"))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(typed: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--backbone", default="resnet18_cifar", help="a YAML of conf/backbone; weights are random")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    options = parser.parse_args(typed)
    try:
        device = environment.choose_device(options.device)
        found = measure(options.backbone, device, options.batch, options.batches, options.rounds)
    except UserError as error:
        print(f"network_choices: error: {error}", file=sys.stderr)
        return 2
    file = options.out / f"network-choices-{options.backbone}-{device.type}.json"
    rows = [{"work": kind, "network": name, **own} for kind, told in found.items() for name, own in told.items()]
    write(file, rows, table(found).rstrip("\n"), environment=environment.describe(device))
    print(f"{table(found)}written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
