"""How much of a federated round is the network's own work: `make bench-training`, or with --device cuda on a GPU.

One run measures both sides, alternating: whole rounds of FedAvg as the engine runs them (choice and augmentation of
batches, decay, steps, messages, averaging), and the bare forward and backward pass on the same number of ready batches
of the same sizes. On CUDA a profiler also says which share of a round's wall time kernels run. --method fedprotip
measures its clients instead, in the rounds of a second task: with layers frozen on both sides, and steps projected.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import write

from fcl_bench import environment
from fcl_bench.backbones.backbone import Trainable
from fcl_bench.composition import config_dir
from fcl_bench.config import load_settings
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.protocol.context import Context, WireFormat
from fcl_bench.protocol.method import Method
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network

CLASSES, SIDE = 10, 32


def images_of(samples: int, side: int = SIDE, seed: int = 0) -> Dataset:
    """Random images, of CIFAR's size if not told: what they show does not change how long they take."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (samples, side, side, 3), dtype=np.uint8)
    split = image_split(np.arange(samples) % CLASSES, ArrayImages(pixels))
    return Dataset("random", split, image_split(split.labels[:CLASSES], ArrayImages(pixels[:CLASSES])))


def network_of(name: str, data: Dataset) -> Trainable:
    """The backbone of a YAML, to be trained."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load_settings(compose("config", overrides=[f"backbone={name}"])).backbone.trainable(data, 0)


def federation_of(method: Method, data: Dataset, start: Trainable, clients: int, device: torch.device) -> Federation:
    """A task of all classes, or (`FedProTIP`) two of half of them; the samples dealt evenly."""
    context = Context(start.dimension, 0, torch.float64, device, WireFormat(torch.float32), start)
    stream = ClassIncremental().cut(data, 2 if isinstance(method, FedProTIP) else 1, 0)
    shards = [list(np.array_split(indices, clients)) for indices in stream.train]
    pixels = torch.from_numpy(data.train.inputs.pixels).permute(0, 3, 1, 2).contiguous()
    labelled = np.ones(len(data.train), dtype=bool)
    transport = InProcess.of(method, context, shards, stream.train_columns, labelled, pixels)
    return Federation(method, context, stream, transport, pixels[:CLASSES])


def seconds_of_rounds(method: Method, data: Dataset, start: Trainable, clients: int, device: torch.device) -> float:
    """Seconds of the clients and the server over all rounds of one task; of FedProTIP's clients in its second task."""
    federation = federation_of(method, data, start, clients, device)
    ledger = federation.run(lambda _: None).ledger
    if isinstance(method, FedProTIP):
        return sum(row.client_seconds for row in ledger.uploads if row.task == 1 and row.stage == "model")
    return sum(row.client_seconds for row in ledger.uploads) + sum(ledger.server_seconds)


def bare_pass(
    method: GradientMethod, start: Trainable, sizes: list[int], device: torch.device, half: bool
) -> Callable[[], float]:
    """Forward and backward on ready batches of these sizes; nothing else."""
    network: Network = Network(start).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    heads = [CLASSES // 2] * 2 if isinstance(method, FedProTIP) else [CLASSES]
    network.grow(heads, 0)
    network.freeze(method.frozen(network, start.stages, len(heads) - 1))
    network.train()
    ready = {
        size: (
            torch.randn(size, 3, start.size, start.size, device=device).to(memory_format=torch.channels_last),
            torch.randint(CLASSES, (size,), device=device),
        )
        for size in set(sizes)
    }

    def run() -> float:
        synchronise(device)
        begin = time.perf_counter()
        for size in sizes:
            images, labels = ready[size]
            network.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = torch.nn.functional.cross_entropy(network(images), labels)
            loss.backward()
        synchronise(device)
        return time.perf_counter() - begin

    return run


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_share(run: Callable[[], float], trace: Path, seconds: float) -> float:
    """Share of the wall time of `run` in which CUDA kernels run; leaves a Chrome trace.

    Args:
        run: a round.
        trace: where the trace goes.
        seconds: of a round that nobody traces: tracing makes the host slower, and no kernel.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    profiler.export_chrome_trace(str(trace))
    return kernel_seconds(profiler.key_averages()) / seconds


def kernel_seconds(events: Iterable[Any]) -> float:
    """Seconds of kernels among a profiler's averages.

    An operation of the host is told with the time of the kernels that it started, which stand in the list themselves.
    """
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in on_device if not event.key.startswith(("Memcpy", "Memset"))]
    return sum(event.self_device_time_total for event in kernels if not event.is_user_annotation) / 1e6


def parse(typed: list[str] | None = None) -> argparse.Namespace:
    """The options; None: of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--backbone", default="tiny", help="a YAML of conf/backbone (tiny, resnet18_cifar)")
    parser.add_argument("--method", default="fedavg", choices=["fedavg", "fedprotip"])
    parser.add_argument("--samples", type=int, default=3200)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=Training.epochs, help="local epochs of a round")
    parser.add_argument("--columns", type=int, default=64, help="method.columns of FedProTIP")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    return parser.parse_args(typed)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Rounds beside bare passes, and (on CUDA) the share of a round's wall time in which kernels run."""
    data = images_of(arguments.samples)
    start = network_of(arguments.backbone, data)
    training = Training(rounds=1, epochs=arguments.epochs)
    method: GradientMethod = FedAvg(training=training)
    if arguments.method == "fedprotip":
        method = FedProTIP(training=training, columns=arguments.columns)
    client_data = arguments.samples // arguments.clients // (1 if arguments.method == "fedavg" else 2)
    whole, rest = divmod(client_data, training.batch_size)
    sizes = ([training.batch_size] * whole + ([rest] if rest else [])) * arguments.clients * arguments.epochs
    bare = bare_pass(method, start, sizes, device, half=device.type == "cuda")

    def rounds() -> float:
        return seconds_of_rounds(method, data, start, arguments.clients, device)

    # Both sides run once to warm up, then in turn, so that other load on the machine affects both.
    sides = {"bare": bare, "rounds": rounds}
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, side in sides.items():
            times[name].append(side())
    ratios = [b / r for b, r in zip(times["bare"], times["rounds"], strict=True)]
    result = {
        "method": arguments.method,
        "backbone": arguments.backbone,
        "device": environment.device_kind(device),
        "threads": torch.get_num_threads(),
        "images_per_second": {name: sum(sizes) / statistics.median(t) for name, t in times.items()},
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
    }
    if device.type == "cuda":
        arguments.out.mkdir(parents=True, exist_ok=True)
        trace = arguments.out / f"training-{arguments.backbone}.trace.json"
        result["kernel_share"] = kernel_share(rounds, trace, statistics.median(times["rounds"]))
        result["trace"] = str(trace)
    return result


def main() -> None:
    arguments = parse()
    device = environment.choose_device(arguments.device)
    result = measure(arguments, device)
    file = arguments.out / f"{arguments.method}-{arguments.backbone}-{device.type}.json"
    write(file, [result])
    for name, speed in result["images_per_second"].items():
        print(f"{name:>10}: {speed:8.0f} images/s")
    print(f"rounds reach {100 * result['ratio_median']:.1f} % of the bare pass (median of {arguments.repeats})")
    if "kernel_share" in result:
        print(f"kernels run in {100 * result['kernel_share']:.1f} % of a round's wall time (trace: {result['trace']})")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
