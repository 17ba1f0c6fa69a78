"""Time small convolutional networks of several clients as one grouped network: `python benchmarks/grouped_networks.py`.

Every client takes the same number of steps on batches of one size, the best case of a grouped network: batch norm
would need masks for others. Sides, alternating in one process:

- single: one client after the other, in channels last, as the trainer does it;
- grouped: `--together` clients in one network whose convolutions have one group per client and whose batch norms have
  each client's channels; in channels last, and (planar) in the usual layout.

All sides take the same steps and end with the same class weights, to rounding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, RATE = 10, 0.01


def body(width: int, side: int, groups: int = 1) -> nn.Sequential:
    """`groups` networks of `backbone=tiny`: images (b, 3 groups, side, side) to features (b, 8 width groups)."""
    channels = [3 * groups, *(groups * width * 2**stage for stage in range(4))]
    modules: list[nn.Module] = []
    for stage, stride in enumerate([1, 2, 2, 2 if side >= 16 else 1]):
        before, after = channels[stage : stage + 2]
        modules += [
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False, groups=groups),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@dataclass
class Setting:
    """Clients with random images that start from one network.

    Attributes:
        width, side: of network and images.
        clients, samples, batch, epochs: samples of each client are a multiple of the batch.
    """

    width: int
    side: int
    clients: int
    samples: int
    batch: int
    epochs: int
    start: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.X = torch.randn(self.clients, self.samples, 3, self.side, self.side)
        self.y = torch.randint(CLASSES, (self.clients, self.samples))
        self.start = {name: value.clone() for name, value in body(self.width, self.side).state_dict().items()}
        self.head = torch.randn(CLASSES, 8 * self.width) / (8 * self.width) ** 0.5

    def trained(self, together: int = 1, layout: torch.memory_format = torch.channels_last) -> torch.Tensor:
        """(clients, classes, d) the class weights of each client after its round, `together` networks at a time."""
        network = body(self.width, self.side, together).to(memory_format=layout).train()  # type: ignore[call-overload]
        head = nn.Parameter(torch.empty(together, *self.head.shape))
        weights, found = [*network.parameters(), head], []
        for first in range(0, self.clients, together):
            group = slice(first, first + together)
            images = self.X[group].transpose(0, 1).flatten(1, 2).contiguous(memory_format=layout)
            with torch.no_grad():
                for name, value in network.state_dict().items():
                    own = self.start[name]
                    value.copy_(own.repeat(together, *[1] * (own.dim() - 1)) if own.dim() else own)
                head.copy_(self.head.expand_as(head))
            for _ in range(self.epochs):
                for begin in range(0, self.samples, self.batch):
                    rows = slice(begin, begin + self.batch)
                    features = network(images[rows]).view(self.batch, together, -1).transpose(0, 1)
                    scores = torch.bmm(features, head.transpose(1, 2)).flatten(0, 1)
                    # The sum of the clients' mean losses.
                    (together * cross_entropy(scores, self.y[group, rows].flatten())).backward()
                    with torch.no_grad():
                        torch._foreach_add_(
                            [weight.data for weight in weights], [weight.grad for weight in weights], alpha=-RATE
                        )
                    for weight in weights:
                        weight.grad = None
            found.append(head.detach().clone())
        return torch.cat(found)


def sides_of(setting: Setting, together: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The timed functions by name."""
    return {
        "single": setting.trained,
        "grouped": lambda: setting.trained(together),
        "grouped, planar": lambda: setting.trained(together, torch.contiguous_format),
    }


def measured(setting: Setting, together: int, repeats: int) -> dict[str, list[float]]:
    """Processor seconds of each side, without a first repetition that warms up."""
    found: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for name, side in sides_of(setting, together).items():
            begin = time.process_time()
            side()
            if repeat:
                found.setdefault(name, []).append(time.process_time() - begin)
    return found


def line(setting: Setting, found: dict[str, list[float]]) -> str:
    """Milliseconds of a client's round, and how many times faster it is in a group: medians of the repetitions."""
    single = found["single"]
    ratios = {
        name: statistics.median(one / other for one, other in zip(single, seconds, strict=True))
        for name, seconds in found.items()
        if name != "single"
    }
    own = 1e3 * statistics.median(single) / setting.clients
    told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return (
        f"width {setting.width}, {setting.side} x {setting.side} pixels, {setting.epochs} steps of {setting.batch}:"
        f" single {own:.1f} ms; single / {told}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--sides", type=int, nargs="+", default=[8, 32], help="of the images, in pixels")
    parser.add_argument("--samples", type=int, default=32, help="of each client, which are one batch")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--together", type=int, default=8, help="clients in one network")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.clients % arguments.together:
        parser.error(f"--clients {arguments.clients} is no multiple of --together {arguments.together}")
    torch.set_num_threads(arguments.threads)
    for side in arguments.sides:
        for width in arguments.widths:
            sizes = (arguments.clients, arguments.samples, arguments.samples, arguments.epochs)
            setting = Setting(width, side, *sizes)
            print(line(setting, measured(setting, arguments.together, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
