"""Time rounds of FedAvg whose small networks train side by side: `python benchmarks/grouped_networks.py`.

Clients train `backbone=tiny` on random images. Whole rounds as the engine runs them, one client after the other and
with each number of `--together` (`parallel_clients`), alternate in one process. All sides take the same steps: their
models are compared, and the largest difference is printed. ReLUs make it jump: see docs/explanation/side_by_side.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.sources.image_source import image_split
from fcl_bench.data.splits.stream import Stream
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.transport import InProcess
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.task import Task
from fcl_bench.protocol.wire import WireFormat
from fcl_bench.training.knobs import Training

CPU, CLASSES = torch.device("cpu"), 10


@dataclass
class Setting:
    """Clients with random images.

    Attributes:
        width, side: of network and images.
        clients, samples: K, and each client's number of samples (their mean, if `unequal`).
        training: batch size, local epochs, rounds.
        unequal: whether clients' numbers are Dirichlet(1) shares of the whole, at least 2.
    """

    width: int
    side: int
    clients: int
    samples: int
    training: Training
    unequal: bool = False
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        sizes = np.full(self.clients, self.samples)
        if self.unequal:
            sizes = np.maximum(2, (rng.dirichlet(np.ones(self.clients)) * sizes.sum()).astype(int))
        whole = int(sizes.sum())
        self.X = torch.from_numpy(rng.integers(0, 256, (whole, 3, self.side, self.side), dtype=np.uint8))
        self.y = np.arange(whole) % CLASSES
        self.shards = np.split(np.arange(whole), np.cumsum(sizes)[:-1])
        one = image_split([0], ArrayImages(np.zeros((1, self.side, self.side), dtype=np.uint8)))
        start = Tiny(self.width, self.side).trainable(Dataset("random", one, one), 0)
        self.context = Context(start.dimension, 0, torch.float64, CPU, WireFormat(torch.float32), start)

    def rounds(self, together: int = 1) -> tuple[dict[str, torch.Tensor], float]:
        """The model after all rounds, and processor seconds."""
        method = FedAvg(training=self.training)
        task, everyone = Task(0, range(CLASSES), CLASSES), np.arange(len(self.y))
        stream = Stream((task,), np.arange(CLASSES), self.y, self.y, (everyone,), (everyone[:1],))
        known = np.ones(len(self.y), dtype=bool)
        parts = (method, self.context, [self.shards], self.y, known, self.X)
        federation = Federation(method, self.context, stream, InProcess.of(*parts, parallel=str(together)), self.X[:1])
        begin = time.process_time()
        federation.run(lambda _: None)
        seconds = time.process_time() - begin
        return federation.server.network.state(), seconds  # type: ignore[attr-defined]


def measured(setting: Setting, together: list[int], repeats: int) -> tuple[dict[int, list[float]], float]:
    """Processor seconds of each number of clients side by side, 1 first, and the largest difference of their models."""
    found: dict[int, list[float]] = {}
    apart = 0.0
    for _ in range(repeats):
        models = {}
        for size in (1, *together):
            models[size], seconds = setting.rounds(size)
            found.setdefault(size, []).append(seconds)
            gaps = [(value - models[1][name]).abs().max() for name, value in models[size].items()]
            apart = max(apart, float(torch.stack(gaps).max()))
    return found, apart


def line(setting: Setting, found: dict[int, list[float]], apart: float) -> str:
    """Milliseconds of a client's round, and how many times faster it is in a group: medians of the repetitions."""
    alone = found[1]
    own = 1e3 * statistics.median(alone) / setting.clients / setting.training.rounds
    ratios = ", ".join(
        f"{size} together {statistics.median(one / other for one, other in zip(alone, seconds, strict=True)):.2f}"
        for size, seconds in found.items()
        if size > 1
    )
    return (
        f"width {setting.width}, {setting.side} x {setting.side} pixels, K {setting.clients}, {setting.samples} samples"
        f"{' in the mean' if setting.unequal else ''}, batches of {setting.training.batch_size}:"
        f" alone {own:.1f} ms; alone / {ratios}; models apart {apart:.0e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--sides", type=int, nargs="+", default=[8, 32], help="of the images, in pixels")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--batches", type=int, nargs="+", default=[20, 32], help="samples per step")
    parser.add_argument("--samples", type=int, default=None, help="of each client; one batch if left out")
    parser.add_argument("--unequal", action="store_true", help="clients' samples are Dirichlet(1) shares")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--together", type=int, nargs="+", default=[16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    environment.reuse_freed_memory()  # as in a run
    Setting(4, 8, 2, 4, Training(rounds=1, epochs=1)).rounds(2)  # first uses
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    for side in arguments.sides:
        for width in arguments.widths:
            for clients in arguments.clients:
                for batch in arguments.batches:
                    training = Training(rounds=1, epochs=arguments.epochs, batch_size=batch)
                    setting = Setting(width, side, clients, arguments.samples or batch, training, arguments.unequal)
                    print(line(setting, *measured(setting, arguments.together, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
