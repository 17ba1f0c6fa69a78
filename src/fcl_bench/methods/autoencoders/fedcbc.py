"""FedCBC: a variational autoencoder per class on frozen features, whose loss classifies (Yu et al., ACM MM 2024).

For each class c of which it has samples, a client trains an autoencoder on them and on samples of the received one, by
    L = mean_x |x^ - x|^2 + kl KL(q(z | x) || N(0, I)) + alpha KL(q(z | x) || q_global(z | x)),
with the last term only if there is a received one. If one client alone sends the first autoencoder of a class, the
server takes it over. Else it draws samples from all autoencoders that it has of the class, and trains on them by the
same loss, where q_global is the mean of their posteriors. A sample is of the class whose autoencoder has the smallest L
without the last term, at z = its posterior mean. No autoencoder ever sees another class, so those of classes that do
not come back stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.environment import exact_kernels
from fcl_bench.errors import require_memory
from fcl_bench.methods.autoencoders import networks
from fcl_bench.methods.autoencoders.fitting import Grouped, Wanted, fitted, fused, latents_of, posteriors
from fcl_bench.methods.autoencoders.networks import Architecture, Bank
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import SUMS, Schema, class_numbers, real, weights
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Method, Server
from fcl_bench.randomness import derived_seed, generator
from fcl_bench.training.knobs import MOST_PASSES

#: The stage in which clients send the smallest and largest value of each feature.
RANGE = "range"
#: The prefix of received autoencoders' names, `vae.<column>.<version>`; what has such a name never changes.
_VAE = "vae."
#: The most numbers of reconstructed features in memory at once.
_AT_ONCE = 2**24


@dataclass
class VAETraining:
    """`method.training`, for the clients, and for the server where it fuses: see conf/method/fedcbc.yaml."""

    rounds: int = knob(5, least=1, most=MOST_PASSES, words="an integer from 1 to 1000000")
    fraction: float = knob(1.0, above=0, most=1)
    epochs: int = knob(300, least=1, most=MOST_PASSES, words="an integer from 1 to 1000000")
    batch_size: int = knob(32, least=1)
    lr: float = knob(0.001, above=0)
    weight_decay: float = knob(0.001, least=0)

    def forward_precision(self, device: str, images: bool) -> str:
        """float32 on every device: autoencoders are small."""
        return "float32"


@dataclass
class FedCBC(Method):
    name: ClassVar[str] = "fedcbc"
    search: ClassVar[Mapping[str, str]] = {"training.lr": "log(1e-4,1e-2)", "kl": "log(0.05,5)"}
    resumes_within_tasks: ClassVar[bool] = True

    training: VAETraining = field(default_factory=VAETraining)
    hidden: int = knob(256, least=1)
    latent: int = knob(128, least=1)
    kl: float = knob(0.5, least=0)
    alpha: float = knob(0.1, least=0)
    samples: int = knob(100, least=1)

    def architecture(self, context: Context) -> Architecture:
        return Architecture(context.inputs, self.hidden, self.latent)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        # The server holds them, the memory for scores, and the uploads of a round (at most every class from every
        # client), with their copies in the classes' order.
        uploads = (context.clients or 1) * max(classes_per_task)
        size = 3 * 4 * (context.all_classes(classes_per_task) + uploads) * self.architecture(context).numbers
        require_memory(f"method.hidden={self.hidden}", size, "the autoencoders of all classes")

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        shapes = self.architecture(context).shapes.items()
        parts = {name: weights(*shape, "held") for name, shape in shapes}
        ends = {"low": real("d", leaks=SUMS), "high": real("d", leaks=SUMS)}
        return {RANGE: ends, MODEL: {"classes": class_numbers("held", distinct=True), **parts}}

    def client(self, context: Context) -> Client:
        return FedCBCClient(self, context)

    def server(self, context: Context) -> Server:
        return FedCBCServer(self, context)


class _Half:
    """What both halves have."""

    def __init__(self, method: FedCBC, context: Context) -> None:
        self.method, self.context = method, context
        self.architecture = method.architecture(context)

    def scaled(self, inputs: torch.Tensor, low: torch.Tensor | None, high: torch.Tensor | None) -> torch.Tensor:
        """Features (n, d) between 0 and 1 at `low` and `high` (d,), as decoders' outputs are, clipped; in float32.

        The range is that of the first task; None: nobody has told it.
        """
        if low is None or high is None:
            return inputs.float()
        low, high = low.to(inputs), high.to(inputs)
        # A feature that never varied says nothing: it becomes 0 at that value, and is clipped elsewhere.
        return ((inputs - low) / torch.where(high > low, high - low, 1)).clamp(0, 1).float()

    def keys(self, columns: torch.Tensor, purpose: str, *indices: int) -> torch.Tensor:
        """(c,) the keys of the random streams of these classes."""
        return networks.keys(derived_seed(self.context.seed, f"vae {purpose}", *indices), columns)


class FedCBCClient(_Half, Client):
    """Trains an autoencoder for each of its classes, keeps them, and starts from them the next time."""

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """The weights of its classes' autoencoders, the classes last; or the range of its features."""
        if broadcast.stage == RANGE:
            return Message({"low": client_data.inputs.amin(dim=0), "high": client_data.inputs.amax(dim=0)}), state
        columns = client_data.labels.unique()
        received = self._received(columns, broadcast)
        own = Bank.empty(self.architecture.numbers, columns.device)
        if state:
            own = Bank(state["vaes.columns"], state["vaes.weights"])
        # Its own autoencoders, else the received ones, else new ones.
        weights = self.architecture.initial(self.keys(columns, "start"))
        for known in (received, own):
            there = known.has(columns)
            weights[there] = known.at(columns[there])
        inputs = self.scaled(client_data.inputs, broadcast.get("range.low"), broadcast.get("range.high"))
        indices = client_data.task, int(broadcast["round"]), client_data.client
        samples, wanted = self._samples(columns, inputs, client_data.labels, received, indices)
        streams = self.keys(columns, "training", *indices)
        with exact_kernels():
            weights = fitted(self.architecture, weights, samples, self.method, streams, wanted)
        parts = {name: part.movedim(0, -1).contiguous() for name, part in self.architecture.parts(weights).items()}
        own = own.updated(columns, weights)
        upload = Message({"classes": columns.to(torch.int32), **parts}, groups=dict.fromkeys(parts, client_data.labels))
        return upload, {"vaes.columns": own.columns, "vaes.weights": own.weights}

    def _received(self, columns: torch.Tensor, broadcast: Message) -> Bank:
        """The broadcast's autoencoders of the classes in `columns`."""
        names = {int(name.split(".")[1]): name for name in broadcast if name.startswith(_VAE)}
        found = [column for column in columns.tolist() if column in names]
        if not found:
            return Bank.empty(self.architecture.numbers, columns.device)
        weights = torch.stack([broadcast[names[column]] for column in found])
        return Bank(torch.tensor(found, device=columns.device), weights.to(columns.device))

    def _samples(
        self,
        columns: torch.Tensor,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        received: Bank,
        indices: tuple[int, ...],
    ) -> tuple[Grouped, Wanted | None]:
        """The training samples, its own of each class and then those drawn; and the posteriors to be held to."""
        method, known = self.method, received.columns
        if len(known):
            latents = latents_of(method, self.keys(known, "samples", *indices))
            made = networks.decode(self.architecture.parts(received.weights), latents)
            inputs = torch.cat([inputs, made.flatten(0, 1)])
            labels = torch.cat([labels, known.repeat_interleave(method.samples)])
        which = torch.searchsorted(columns, labels)
        inputs = inputs[which.argsort(stable=True)]
        samples = Grouped(inputs, torch.bincount(which, minlength=len(columns)))
        if not method.alpha or not len(known):
            return samples, None
        held = received.has(columns)
        teachers = torch.zeros(len(columns), self.architecture.numbers, device=columns.device)
        teachers[held] = received.weights
        mean, log_variance = posteriors(self.architecture, teachers, samples)
        return samples, Wanted(mean, log_variance, method.alpha * held.float())


class FedCBCServer(_Half, Server):
    """Keeps one autoencoder per class, and fuses those of several clients.

    Attributes:
        bank: the autoencoders.
        versions: by class, how often its autoencoder has changed.
        low, high: (d,) smallest and largest value of each feature; None: no client has sent them yet.
        query_tasks: the tasks that begin with the stage that collects ranges.
    """

    state = ("bank", "versions", "low", "high", "query_tasks", "seen")

    def __init__(self, method: FedCBC, context: Context) -> None:
        super().__init__(method, context)
        self.bank = Bank.empty(self.architecture.numbers, context.device)
        self.versions: dict[int, int] = {}
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None
        self.query_tasks = {0}
        self.seen, self._stage, self._task, self._round = 0, MODEL, 0, 0
        #: The uploads of the round at hand, by client: a sum of them could not be fused.
        self._uploads: dict[int, Bank] = {}

    def start_task(self, task: Task) -> None:
        self._task, self.seen = task.index, task.columns_seen
        if self.low is None:
            self.query_tasks.add(task.index)

    def _stages(self, task: Task) -> list[str]:
        return [*([RANGE] if task.index in self.query_tasks else []), *[MODEL] * self.method.training.rounds]

    def rounds(self, task: Task) -> int:
        return len(self._stages(task))

    def model_rounds(self, task: Task) -> list[int]:
        return [round_ for round_, stage in enumerate(self._stages(task)) if stage == MODEL]

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        """A random `fraction` of the clients, at least one; in the stage for the range, all clients."""
        fraction = self.method.training.fraction
        if fraction == 1 or not available or self._stages(task)[round_] == RANGE:
            return available
        rng = generator(self.context.seed, "participants", task.index, round_)
        return sorted(rng.choice(available, max(1, round(fraction * len(available))), replace=False).tolist())

    def may_return(self, task: Task, refused: int, round_: int) -> bool:
        """Yes in the model's rounds, which use the broadcast alone."""
        return self._stages(task)[refused] == MODEL

    def broadcast(self, task: Task, round_: int) -> Message:
        """All autoencoders. Those that have not changed since a client had them are not sent again."""
        self._stage, self._round, self._uploads = self._stages(task)[round_], round_, {}
        if self._stage == RANGE:
            return Message({}, RANGE)
        named = zip(self.bank.columns.tolist(), self.bank.weights, strict=True)
        sent = {f"{_VAE}{column}.{self.versions[column]}": weights for column, weights in named}
        if self.low is not None and self.high is not None:
            sent |= {"range.low": self.low, "range.high": self.high}
        return Message({**sent, "round": torch.tensor(round_)}, MODEL, cached=sent)

    def schema(self, task: Task, stage: str) -> Schema:
        found = super().schema(task, stage)
        if stage == RANGE:
            return found
        return {**found, "classes": replace(found["classes"], among=frozenset(task.columns))}

    def objection(self, upload: Message) -> str:
        crossed = self._stage == RANGE and bool((upload["low"] > upload["high"]).any())
        return "its smallest values are above its largest" if crossed else ""

    def absorb(self, client: int, upload: Message) -> None:
        if self._stage == RANGE:
            low, high = upload["low"].float(), upload["high"].float()
            self.low = low if self.low is None else torch.minimum(self.low, low)
            self.high = high if self.high is None else torch.maximum(self.high, high)
            return
        parts = [upload[name].float().movedim(-1, 0).flatten(1) for name in self.architecture.shapes]
        self._uploads[client] = Bank(upload["classes"].long(), torch.cat(parts, dim=1))

    def finish_round(self) -> None:
        """Take over autoencoders that one client alone has, and fuse the others, in order of the clients' numbers."""
        uploads = [self._uploads[client] for client in sorted(self._uploads)]
        self._uploads = {}
        if not uploads:
            return
        columns = torch.cat([upload.columns for upload in uploads])
        changed = columns.unique()
        # The known autoencoder of a class is a teacher too, the last one.
        known = changed[self.bank.has(changed)]
        columns = torch.cat([columns, known])
        weights = torch.cat([*[upload.weights for upload in uploads], self.bank.at(known)])
        order = columns.argsort(stable=True)
        indices = self._task, self._round
        with exact_kernels():
            new = fused(
                self.architecture,
                weights[order],
                torch.bincount(torch.searchsorted(changed, columns)),
                self.bank.has(changed),
                self.method,
                self.keys(changed, "fusion", *indices),
            )
        self.bank = self.bank.updated(changed, new)
        for column in changed.tolist():
            self.versions[column] = self.versions.get(column, 0) + 1

    def finish_task(self) -> None:
        """The autoencoders of the last round are the task's."""

    @torch.inference_mode()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Minus the loss of each class's autoencoder; the lowest number there is for a class without one."""
        found = torch.full((len(inputs), self.seen), torch.finfo(torch.float32).min / 2, device=inputs.device)
        scaled = self.scaled(inputs, self.low, self.high)
        parts, columns = self.architecture.parts(self.bank.weights), self.bank.columns
        at_once = max(1, _AT_ONCE // max(1, len(columns) * max(self.context.inputs, self.method.hidden)))
        with exact_kernels():
            for begin in range(0, len(inputs) if len(columns) else 0, at_once):
                rows = scaled[begin : begin + at_once]
                apart = networks.losses(parts, rows.expand(len(columns), -1, -1), None, self.method.kl)[0]
                found[begin : begin + at_once, columns] = -apart.T
        return found

    def model(self) -> dict[str, torch.Tensor]:
        """`vaes` (k, P) of the classes `columns` (k,), and `low`, `high` (d,)."""
        ends = {name: end for name, end in (("low", self.low), ("high", self.high)) if end is not None}
        return {"vaes": self.bank.weights, "columns": self.bank.columns, **ends}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        self.bank, self.seen = Bank(model["columns"], model["vaes"]), tasks[-1].columns_seen
        self.low, self.high = model.get("low"), model.get("high")

    def report(self) -> dict[str, Any]:
        """`vae_bytes`, the bytes of one autoencoder; `classes`, the number of classes that have one."""
        return {"vae_bytes": 4 * self.architecture.numbers, "classes": len(self.bank.columns)}
