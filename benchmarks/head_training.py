"""Compare rounds of FedAvg on cached features with a plain autograd loop: `make bench-heads`.

Clients train class weights alone (`method.trains=features`). One run measures all sides, alternating:

- rounds: whole rounds as the engine runs them: shards, messages, codec, admission, ledger, average;
- training: the clients' computations in these rounds, as the same calls without messages: model in, local steps,
  average;
- rounds*, training*: the same with `--together` clients side by side (`parallel_clients`);
- plain: `nn.Linear`, `cross_entropy` and `torch.optim.SGD` for each client, with a deep copy of the model for each and
  an average of state dicts, batches being rows of a tensor;
- loader: the same with a `DataLoader` for each client, as public code has it.

All of them take the same steps: the same batches in the same order, so that the models agree to rounding.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from report import write

from fcl_bench import environment
from fcl_bench.data.images.batches import Samples, epoch_batches
from fcl_bench.data.splits.base import Stream
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.gradient.batched_heads import Steps, Turn, train_heads
from fcl_bench.methods.gradient.client import head_seed
from fcl_bench.protocol.context import Context, Task, WireFormat
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network, feature_start
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import Trainer, rows

CPU = torch.device("cpu")


class Setting:
    """Clients with random features, and a head for all classes.

    Args:
        clients, samples, classes, inputs: K, samples of each client, C and d.
        training: rounds, local epochs, batch size, step size.
        together: clients side by side, where they are.
    """

    def __init__(
        self, clients: int, samples: int, classes: int, inputs: int, training: Training, together: int = 16
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.training, self.classes, self.together = training, classes, together
        self.X = torch.randn(clients * samples, inputs, generator=generator)
        self.y = torch.arange(clients * samples) % classes
        self.context = Context(inputs, 0, torch.float64, CPU, WireFormat(torch.float32))
        self.shards = np.split(np.arange(clients * samples), clients)

    def network(self) -> Network:
        """The network with which everyone starts."""
        network = Network(feature_start(self.context.inputs))
        network.grow([self.classes], head_seed(self.context))
        return network

    def seed(self, round_: int, client: int) -> int:
        """The seed of a client's batches in a round."""
        return derived_seed(self.context.seed, "training", 0, round_, client)

    def rounds(self, together: int = 1) -> dict[str, torch.Tensor]:
        """Rounds as the engine runs them."""
        method = FedAvg(training=self.training, trains="features")
        labels = self.y.numpy()
        task, everyone = Task(0, range(self.classes), self.classes), np.arange(len(labels))
        stream = Stream((task,), np.arange(self.classes), labels, labels, (everyone,), (everyone[:1],))
        known = np.ones(len(labels), dtype=bool)
        transport = InProcess.of(method, self.context, [self.shards], labels, known, self.X, parallel=str(together))
        federation = Federation(method, self.context, stream, transport, self.X[:1])
        federation.run(lambda _: None)
        return head_of(federation.server.network.heads[0])  # type: ignore[attr-defined]

    def steps(self) -> dict[str, torch.Tensor]:
        """The clients' training alone."""
        network, trainer = self.network(), Trainer(self.training, rows, CPU)
        parts = [Samples(self.X[chosen], self.y[chosen]) for chosen in map(torch.from_numpy, self.shards)]
        model = {name: value.clone() for name, value in network.state().items()}
        for round_ in range(self.training.rounds):
            sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in model.items()}
            for client, samples in enumerate(parts):
                network.load(model)
                trainer.train(network, samples, self.training.lr, self.seed(round_, client), Objective())
                for name, value in network.changing().items():
                    sums[name].add_(value, alpha=len(samples))
            model = {name: (value / len(self.y)).float() for name, value in sums.items()}
        return {name.removeprefix("heads.0."): value for name, value in model.items()}

    def steps_together(self) -> dict[str, torch.Tensor]:
        """The same of clients that train side by side."""
        parts = [(self.X[chosen], self.y[chosen]) for chosen in map(torch.from_numpy, self.shards)]
        weight, bias = self.network().classifier()
        knobs, model = self.training, torch.cat([weight, bias.unsqueeze(1)], dim=1)
        for round_ in range(knobs.rounds):
            turns = [Turn(X, y, self.seed(round_, client)) for client, (X, y) in enumerate(parts)]
            total = torch.zeros_like(model, dtype=torch.float64)
            for first in range(0, len(turns), self.together):
                group = turns[first : first + self.together]
                heads = train_heads(model, group, Steps(Objective(), knobs, knobs.lr))
                for client, turn in enumerate(group):
                    total.add_(heads[client], alpha=len(turn.labels))
            model = (total / len(self.y)).float()
        return {"weight": model[:, :-1], "bias": model[:, -1]}

    def plain(self, loader: bool = False) -> dict[str, torch.Tensor]:
        """Federated averaging as in a tutorial."""
        model = torch.nn.Linear(self.context.inputs, self.classes)
        model.load_state_dict(head_of(self.network().heads[0]))
        parts = [(self.X[chosen], self.y[chosen]) for chosen in map(torch.from_numpy, self.shards)]
        for round_ in range(self.training.rounds):
            trained = []
            for client, (X, y) in enumerate(parts):
                local = copy.deepcopy(model)
                optimiser = torch.optim.SGD(local.parameters(), lr=self.training.lr)
                batches = self.loaded(X, y, round_, client) if loader else self.chosen(X, y, round_, client)
                for inputs, labels in batches:
                    optimiser.zero_grad()
                    loss = torch.nn.functional.cross_entropy(local(inputs), labels)
                    loss.backward()
                    optimiser.step()
                trained.append(local.state_dict())
            total = len(self.y)
            model.load_state_dict(
                {
                    name: sum(len(y) / total * state[name] for (_, y), state in zip(parts, trained, strict=True))
                    for name in model.state_dict()
                }
            )
        return head_of(model)

    def chosen(
        self, X: torch.Tensor, y: torch.Tensor, round_: int, client: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of all epochs, as rows of the tensors."""
        generator = torch.Generator().manual_seed(self.seed(round_, client))
        for _ in range(self.training.epochs):
            for chosen in epoch_batches(len(y), self.training.batch_size, generator):
                yield X[chosen], y[chosen]

    def loaded(
        self, X: torch.Tensor, y: torch.Tensor, round_: int, client: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same from a `DataLoader`."""
        generator = torch.Generator().manual_seed(self.seed(round_, client))
        data = torch.utils.data.TensorDataset(X, y)
        for _ in range(self.training.epochs):
            order = [chosen.tolist() for chosen in epoch_batches(len(y), self.training.batch_size, generator)]
            yield from torch.utils.data.DataLoader(data, batch_sampler=order)


def head_of(head: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a linear layer, by name."""
    return {name: value.detach().clone() for name, value in head.state_dict().items()}


def sides_of(setting: Setting) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """The timed functions by name; each returns its final model."""
    return {
        "rounds": setting.rounds,
        "training": setting.steps,
        "rounds*": lambda: setting.rounds(setting.together),
        "training*": setting.steps_together,
        "plain": setting.plain,
        "loader": lambda: setting.plain(loader=True),
    }


def measured(setting: Setting, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per client and round of each side, one list of wall time and one of the processor's."""
    sides = sides_of(setting)
    turns = setting.training.rounds * len(setting.shards)
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "processor": []} for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            wall, processor = time.perf_counter(), time.process_time()
            side()
            spent = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
            # The first repetition warms up.
            if repeat:
                for clock, seconds in spent.items():
                    found[name][clock].append(seconds / turns)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Medians, and medians of each repetition's ratios to ours."""
    lines = [f"{'':10}{'wall':>12}{'processor':>12}   {'/ rounds':>18}{'/ training':>18}"]
    for name, clocks in found.items():
        times = [f"{1e6 * statistics.median(clocks[clock]):9.0f} us" for clock in ("wall", "processor")]
        ratios = [
            "{:.2f} ({:.2f})".format(*(ratio(clocks[clock], found[ours][clock]) for clock in ("wall", "processor")))
            for ours in ("rounds", "training")
        ]
        lines.append(f"{name:10}{times[0]:>12}{times[1]:>12}   {ratios[0]:>18}{ratios[1]:>18}")
    return "\n".join(lines)


def ratio(theirs: list[float], ours: list[float]) -> float:
    """The median over the repetitions."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=50, help="of each client")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--inputs", type=int, default=512, help="numbers in a feature")
    parser.add_argument("--together", type=int, default=16, help="clients side by side, of the sides with a star")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1, help="local epochs of a round")
    parser.add_argument("--threads", type=int, default=None, help="of torch; as many as cores if left out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    environment.reuse_freed_memory()  # as in a run
    training = Training(rounds=arguments.rounds, epochs=arguments.epochs, weight_decay=0.0)
    sizes = (arguments.clients, arguments.samples, arguments.classes, arguments.inputs)
    setting = Setting(*sizes, training, arguments.together)
    found = measured(setting, arguments.repeats)
    print(f"a client's turn, {torch.get_num_threads()} threads; in brackets by processor time")
    print(table(found))
    sizes_of = {name: value for name, value in vars(arguments).items() if isinstance(value, int)}
    file = arguments.out / f"heads-{arguments.samples}.json"
    rows = [{"side": name, **clocks} for name, clocks in found.items()]
    write(file, rows, sizes=sizes_of, environment=environment.describe(CPU))
    print(f"written: {file}")


if __name__ == "__main__":
    main()
