"""How much of feature extraction is the network's own work: the extractor on encoded images, and the bare network.

    python -m benchmarks extraction_throughput --backbone resnet18
    python -m benchmarks extraction_throughput --backbone vit_b16 --samples 32
    python -m benchmarks extraction_throughput --backbone resnet18 --device cuda

One run measures both sides, alternating: the frozen pass as a run makes it (reading, decoding, resizing, standardising,
the network, features back on the CPU), and the same network with random weights on ready tensors of the same batch
size and precision. The images are CIFAR-100's where --data has them, or made here: `webp32` as small as those,
`jpeg500` of 500 x 375 pixels, which take four times as long to decode and resize.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# As in the command, this is set before torch is imported: spinning threads would take the cores from decoding threads.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
from PIL import Image
from report import write

from fcl_bench import environment
from fcl_bench.backbones.backbone import Backbone
from fcl_bench.backbones.network_extractor import TimmExtractor
from fcl_bench.composition import config_dir
from fcl_bench.config import load_settings
from fcl_bench.data.images.stored import EncodedImages
from fcl_bench.data.sources.base import Dataset, Split, image_split
from fcl_bench.data.sources.hub_images import HubImages

#: Width and height in pixels, format and quality of the images made here; this many different ones are repeated.
MADE = {"webp32": ((32, 32), "WEBP", {"lossless": True}), "jpeg500": ((500, 375), "JPEG", {"quality": 90})}
DIFFERENT = 64


def encoded_images(kind: str, samples: int, seed: int = 0) -> Split:
    """Encoded pictures with edges, shades and grain, so that decoding one takes about as long as a photograph."""
    import datasets

    (width, height), encoding, options = MADE[kind]
    rng = np.random.default_rng(seed)
    contents = []
    for _ in range(min(DIFFERENT, samples)):
        coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        shades = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.integers(-8, 9, shades.shape, dtype=np.int16)
        buffer = io.BytesIO()
        Image.fromarray(np.clip(shades + grain, 0, 255).astype(np.uint8)).save(buffer, encoding, **options)
        contents.append(buffer.getvalue())
    rows = [{"bytes": contents[index % len(contents)], "path": None} for index in range(samples)]
    table = datasets.Dataset.from_dict({"img": rows}, features=datasets.Features({"img": datasets.Image(decode=False)}))
    return image_split(np.zeros(samples, dtype=np.int64), EncodedImages(table, "img", kind))


def cifar100(folder: Path, samples: int) -> Split:
    """The first test images."""
    source = HubImages("cifar100", "uoft-cs/cifar100", "local", "img", "fine_label", path=str(folder), per_class=1)
    test = source.load().test
    if samples > len(test):
        raise SystemExit(f"--samples {samples}: {folder} has {len(test)} test images")
    return Split(test.labels[:samples], test.inputs, test.fingerprint)


def backbone_of(name: str, precision: str) -> Backbone:
    """The backbone of a YAML with random weights."""
    from hydra import compose, initialize_config_dir

    overrides = [f"backbone={name}", "backbone.pretrained=false", f"backbone.precision={precision}"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load_settings(compose("config", overrides=overrides)).backbone


def bare_pass(
    backbone: Backbone, data: Dataset, batch: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], float]:
    """The network on as many ready images as `data.train` has, in batches of the same sizes; nothing else."""
    start = backbone.trainable(data, 0)
    body = start.build().eval().requires_grad_(False).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    whole, rest = divmod(len(data.train), batch)
    sizes = [batch] * whole + ([rest] if rest else [])
    ready = {
        size: torch.randn(size, 3, start.size, start.size, device=device).to(memory_format=torch.channels_last)
        for size in set(sizes)
    }

    def run() -> float:
        synchronise(device)
        begin = time.perf_counter()
        with torch.no_grad(), environment.exact_kernels():
            for size in sizes:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    body(ready[size])
        synchronise(device)
        return time.perf_counter() - begin

    return run


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    samples = arguments.samples or (8192 if device.type == "cuda" else 256)
    if arguments.images == "cifar100":
        split = cifar100(arguments.data, samples)
    else:
        split = encoded_images(arguments.images, samples)
    data = Dataset(arguments.images, split, split)
    precision = arguments.precision
    if precision == "auto":
        precision = "float16" if device.type == "cuda" else "float32"
    backbone = backbone_of(arguments.backbone, precision)
    extractor = backbone.open(data, device)
    assert isinstance(extractor, TimmExtractor)
    extractor.batch = arguments.batch_size or extractor.batch
    extractor.workers = arguments.workers or extractor.workers
    batch = len(next(extractor.batches(split)))
    bare = bare_pass(backbone, data, batch, device, getattr(torch, precision))

    def extraction() -> float:
        begin = time.perf_counter()
        count = sum(len(features) for features in extractor.batches(split))
        seconds = time.perf_counter() - begin
        assert count == samples
        return seconds

    # Both sides run once to warm up, then in turn, so that other load on the machine affects both.
    sides = {"bare": bare, "extraction": extraction}
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, side in sides.items():
            begin = time.process_time()
            times[name].append(side())
            processor[name].append(time.process_time() - begin)
    ratios = [b / e for b, e in zip(times["bare"], times["extraction"], strict=True)]
    return {
        "backbone": arguments.backbone,
        "images": arguments.images,
        "samples": samples,
        "batch_size": batch,
        "precision": precision,
        "device": environment.device_kind(device),
        "threads": torch.get_num_threads(),
        "workers": extractor.workers,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "images_per_second": {name: samples / statistics.median(seconds) for name, seconds in times.items()},
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        # Of all threads: on a CPU a second opinion that other work on the same cores disturbs less.
        "processor_ratio": sum(processor["bare"]) / sum(processor["extraction"]) if device.type == "cpu" else None,
    }


def parse(typed: list[str] | None = None) -> argparse.Namespace:
    """The options, those that depend on others filled in; None: of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--backbone", default="resnet18", help="a YAML of conf/backbone with a timm network")
    parser.add_argument("--images", choices=["cifar100", *MADE], help="default: cifar100 if --data is there, or webp32")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/cifar100"), help="CIFAR-100's parquet files")
    parser.add_argument("--samples", type=int, help="images of a pass; default: 256, on CUDA 8192")
    parser.add_argument("--batch-size", type=int, help="images per forward pass; default: 4, on CUDA 256")
    parser.add_argument("--workers", type=int, help="threads that decode; default: one for each core")
    parser.add_argument("--precision", default="auto", help="backbone.precision")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    arguments = parser.parse_args(typed)
    arguments.images = arguments.images or ("cifar100" if arguments.data.is_dir() else "webp32")
    return arguments


def main() -> None:
    arguments = parse()
    device = environment.choose_device(arguments.device)
    result = measure(arguments, device)
    file = arguments.out / f"extraction-{arguments.backbone}-{arguments.images}-{device.type}.json"
    write(file, [result])
    for name, speed in result["images_per_second"].items():
        print(f"{name:>10}: {speed:8.1f} images/s")
    print(
        f"extraction reaches {100 * result['ratio_median']:.1f} % of the bare network "
        f"(median of {arguments.repeats}, {arguments.images})"
    )
    if result["processor_ratio"] is not None:
        print(f"by processor time {100 * result['processor_ratio']:.1f} %")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
