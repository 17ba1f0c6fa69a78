"""Compare rounds of FedAvg with many small clients with a plain loop: `make bench-small`.

The network of `backbone=tiny` trains on random images of digits' size, one local epoch per round, so that what is done
once per client weighs as much as it can. One run measures all sides, alternating, in processor seconds of one thread:

- rounds: whole rounds as the engine runs them: shards, messages, codec, admission, ledger, average;
- plain: federated averaging as a tutorial has it: a deep copy of the model for each client, `torch.optim.SGD`,
  `cross_entropy`, a weighted sum of state dicts;
- loaded: the same with one local model that loads the global state dict for each client;
- bare: forward, backward, decay and step on a ready batch of the same size; nothing else.

The first three take the same steps: the same batches in the same order, and their models agree to rounding.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import write
from training_throughput import CLASSES, federation_of, images_of, network_of

from fcl_bench import environment
from fcl_bench.data.images.batches import Standardise, epoch_batches
from fcl_bench.engine.loop import Federation
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.gradient.client import head_seed
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network

CPU = torch.device("cpu")
#: Clients and samples per client of the table.
CASES = ("100x32", "500x20", "1000x20")
#: Weights of two sides differ by no more after the few steps that are measured.
AGREE = 1e-4


class Setting:
    """K clients with n random images each.

    Args:
        clients, samples: K and n.
        side: of the images, in pixels.
        backbone: name of a YAML of conf/backbone.
        rounds: of federated averaging.
    """

    def __init__(self, clients: int, samples: int, side: int, backbone: str, rounds: int) -> None:
        self.data = images_of(clients * samples, side)
        self.start = network_of(backbone, self.data)
        self.training = Training(rounds=rounds, epochs=1, augment="none")
        self.clients, self.turns = clients, rounds * clients
        federation = self._federation()
        data = federation.transport.everything
        assert data is not None
        self.context = federation.context
        shards = [data.client_data(0, client) for client in range(clients)]
        self.parts = [(client_data.inputs, client_data.labels) for client_data in shards]
        self.standardise = Standardise(self.start.size, self.start.mean, self.start.std)

    def _federation(self) -> Federation:
        return federation_of(FedAvg(training=self.training), self.data, self.start, self.clients, CPU)

    def network(self) -> Network:
        """The network with which everyone starts."""
        network = Network(self.start)
        network.grow([CLASSES], head_seed(self.context))
        return network

    def rounds(self) -> dict[str, torch.Tensor]:
        """Rounds as the engine runs them."""
        federation = self._federation()
        federation.run(lambda _: None)
        return dict(federation.server.network.state())  # type: ignore[attr-defined]

    def plain(self, copied: bool = True) -> dict[str, torch.Tensor]:
        """Federated averaging; `copied`: by a deep copy for each client, else by one that loads the state dict."""
        knobs, model = self.training, self.network()
        local = copy.deepcopy(model)
        for round_ in range(knobs.rounds):
            total = sum(len(labels) for _, labels in self.parts)
            sums = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
            for client, (images, labels) in enumerate(self.parts):
                if copied:
                    local = copy.deepcopy(model)
                else:
                    local.load_state_dict(model.state_dict())
                local.train()
                optimiser = torch.optim.SGD(local.parameters(), lr=knobs.lr, weight_decay=knobs.weight_decay)
                seed = derived_seed(self.context.seed, "training", 0, round_, client)
                generator = torch.Generator().manual_seed(seed)
                for chosen in epoch_batches(len(labels), knobs.batch_size, generator):
                    optimiser.zero_grad()
                    scores = local(self.standardise(images[chosen]))
                    torch.nn.functional.cross_entropy(scores, labels[chosen]).backward()
                    optimiser.step()
                for name, value in local.state_dict().items():
                    if value.is_floating_point():
                        sums[name] += len(labels) / total * value
            model.load_state_dict(sums)
        return model.state()

    def bare(self) -> dict[str, torch.Tensor]:
        """As many steps on a ready batch, of a network that no client takes over."""
        network = self.network().to(memory_format=torch.channels_last).train()
        weights = list(network.parameters())
        images, labels = self.parts[0]
        batch = self.standardise(images)
        for _ in range(self.turns):
            for weight in weights:
                weight.grad = None
            torch.nn.functional.cross_entropy(network(batch), labels).backward()
            with torch.no_grad():
                steps = [weight.grad for weight in weights]
                torch._foreach_add_(steps, weights, alpha=self.training.weight_decay)
                torch._foreach_add_(weights, steps, alpha=-self.training.lr)
        return {}


def sides_of(setting: Setting) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """The timed functions by name; each returns its final model, except for the bare steps."""
    return {
        "rounds": setting.rounds,
        "plain": setting.plain,
        "loaded": lambda: setting.plain(copied=False),
        "bare": setting.bare,
    }


def measured(setting: Setting, repeats: int) -> dict[str, list[float]]:
    """Processor seconds per client and round of each side, after one time to warm up.

    Raises:
        SystemExit: two sides have not trained the same model.
    """
    found: dict[str, list[float]] = {name: [] for name in sides_of(setting)}
    models = {}
    for repeat in range(repeats + 1):
        for name, side in sides_of(setting).items():
            begin = time.process_time()
            models[name] = side()
            if repeat:
                found[name].append((time.process_time() - begin) / setting.turns)
    for name in ("plain", "loaded"):
        far = apart(models["rounds"], models[name])
        if not far <= AGREE:
            sys.exit(f"small_clients: error: rounds and {name} end with models that are {far:.2g} apart")
    return found


def apart(model: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two weights."""
    return max(float((value - other[name]).abs().max()) for name, value in model.items())


def row(case: str, found: dict[str, list[float]]) -> str:
    """Medians, and medians over the repetitions of ratios, as a line of a Markdown table."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratios = [
        statistics.median(ours / theirs for ours, theirs in zip(found["rounds"], found[beside], strict=True))
        for beside in ("plain", "loaded", "bare")
    ]
    cells = [case.replace("x", " x "), *(f"{1e3 * own:.2f} ms" for own in medians.values())]
    return f"| {' | '.join([*cells, *(f'{ratio:.2f}' for ratio in ratios)])} |"


HEADER = """\
| clients x samples | rounds | plain | loaded | bare | rounds / plain | rounds / loaded | rounds / bare |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="KxN", help="clients x samples of each")
    parser.add_argument("--backbone", default="tiny", help="a YAML of conf/backbone")
    parser.add_argument("--side", type=int, default=8, help="of the images, in pixels")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    environment.reuse_freed_memory()  # as the command does, and for all sides
    seconds = {}
    print(f"processor time of a client's turn, medians of {arguments.repeats}, {arguments.side} pixels\n\n{HEADER}")
    for case in arguments.cases:
        clients, samples = map(int, case.split("x"))
        setting = Setting(clients, samples, arguments.side, arguments.backbone, arguments.rounds)
        seconds[case] = measured(setting, arguments.repeats)
        print(row(case, seconds[case]), flush=True)
    file = arguments.out / f"small-clients-{arguments.backbone}-{arguments.side}.json"
    rows = [{"clients x samples": case, "seconds": own} for case, own in seconds.items()]
    write(file, rows, rounds=arguments.rounds, environment=environment.describe(CPU))
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    main()
