"""LANDER (Tran et al., CVPR 2024): data-free replay with an anchor in a space of text embeddings for every class.

Beside the head the network has a mapping A of its features phi to the space of the anchors e_c (R^d_e). The loss
pulls samples of a class into a ball around its anchor, B(a, e) = relu(mse(a, e) - r), in training and in generation.

    client, first task    CE + ltc B(A phi(x), e_y)
    client, later         cur [CE_N(x) + ltc B(A phi(x), e_y)] + pre [KD_2(q_O(u), q'(u)) + mse(A phi(u), A' phi'(u))]
    factors               cur = c (1 + 1/a) / b, pre = p a b with a = log2(|seen| / 2 + 1), b = sqrt(|O| / |seen|)
    server, per batch     bn R + oh CE + ltc B(A' phi'(u), e_y) - adv mean 1(student = teacher) KL_1

x is of the task's classes N, u of the synthetic images, q', A', phi' of the teacher (the model with which the last task
ended), O are its columns, KD_T = -mean sum softmax(q'/T) log softmax(q/T), c and p the knobs `cur` and `pre`. A task
ends with the model that came into the round of the lowest total training loss, of which every client uploads its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.nn.functional import mse_loss

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash
from fcl_bench.methods.data_free.generative import DataFreeClient, DataFreeMethod, DataFreeServer, made_prefix
from fcl_bench.methods.data_free.generators import anchored
from fcl_bench.methods.data_free.generators.images import ImagePool
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import SUM, Schema, real
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective, distillation

#: Prefix of the names of anchors, by task.
_ANCHORS = "anchors."
#: What clients upload beside the model.
_LOSS = "loss"


#: The temperature of KD_2.
_TEMPERATURE = 2.0


def factors(seen: int, known: int) -> tuple[float, float]:
    """(1 + 1/a) / b and a b, the factors of `cur` and `pre` if `known` of `seen` classes are old."""
    a, b = math.log2(seen / 2 + 1), math.sqrt(known / seen)
    return (1 + 1 / a) / b, a * b


class Bounded(Objective):
    """The client's loss; it also adds up its values.

    Args:
        anchors: (C, d_e) of all columns; None: ltc is 0.
        current, previous: the factors of the task's own loss and of the terms of synthetic images.
        teacher: frozen; None: there are no synthetic images.
        pool: of these, as many in each step as of the client's own.
    """

    def __init__(
        self,
        heads: Heads,
        method: LANDER,
        anchors: torch.Tensor | None,
        current: float = 1.0,
        previous: float = 0.0,
        teacher: Network | None = None,
        pool: ImagePool | None = None,
    ) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._method, self._anchors, self._teacher, self._pool = method, anchors, teacher, pool
        self._current, self._previous = current, previous
        self._losses: list[torch.Tensor] = []

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = network.body(inputs)
        loss = self.score_loss(network.logits(features), labels, inputs)
        if self._anchors is not None:
            assert isinstance(network, anchored.MappedNetwork)
            pulled = anchored.outside(network.mapping(features), self._anchors[labels], self._method.radius)
            loss = loss + self._method.ltc * pulled
        loss = self._current * loss
        if self._pool is not None:
            loss = loss + self._previous * self.replayed(network, self._pool.next(self._method.training.batch_size))
        self._losses.append(loss.detach())
        return loss

    def replayed(self, network: Network, images: torch.Tensor) -> torch.Tensor:
        """The terms of synthetic images (b, 3, size, size)."""
        teacher = self._teacher
        assert isinstance(network, anchored.MappedNetwork)
        assert isinstance(teacher, anchored.MappedNetwork)
        features = network.body(images)
        with torch.no_grad():
            known = teacher.body(images)
            wanted, mapped = teacher.logits(known), teacher.mapping(known)
        distilled = distillation(network.logits(features), wanted, _TEMPERATURE)
        return distilled + mse_loss(network.mapping(features), mapped)

    def first_pass(self, passes: int) -> torch.Tensor:
        """(1,) the sum of the losses of the first pass; all `passes` have the same number of batches."""
        losses = self._losses[: len(self._losses) // passes]
        return torch.stack(losses).float().sum(dim=0, keepdim=True) if losses else torch.zeros(1)


class LANDERClient(DataFreeClient):
    """Trains with anchors and, from the second task on, on synthetic images under the teacher."""

    method: LANDER
    #: Of the turn at hand.
    _objective: Bounded | None = None

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """The upload of any gradient method, and the total loss of the first epoch, 4 bytes."""
        upload, new_state = super().update(client_data, broadcast, state)
        if broadcast.stage == MODEL and self.method.returns:
            assert self._objective is not None
            loss = {_LOSS: self._objective.first_pass(self.method.training.epochs)}
            upload = replace(upload, tensors={**upload, **loss})
        self._objective = None
        return upload, new_state

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        method, heads = self.method, Heads.from_message(broadcast)
        anchors = self.anchors(broadcast) if method.ltc else None
        if not client_data.task:
            self._objective = Bounded(heads, method, anchors)
            return self._objective
        seen, pool, teacher = sum(heads.sizes), None, self.teacher(client_data, broadcast)
        of_current, of_previous = factors(seen, seen - heads.sizes[-1])
        if teacher is not None:
            images = self.made(client_data, broadcast)["images"][: method.synthesis.images]
            seed = self.synthetic_seed(client_data, broadcast)
            pool = ImagePool(images, seed, Augment(method.training.augment), self.scale)
        current, previous = method.cur * of_current, method.pre * of_previous
        self._objective = Bounded(heads, method, anchors, current, previous, teacher, pool)
        return self._objective

    def anchors(self, broadcast: Message) -> torch.Tensor:
        """(C, d_e) of all columns."""
        return torch.cat([broadcast[f"{_ANCHORS}{task}"] for task in range(len(Heads.from_message(broadcast).sizes))])


class LANDERServer(DataFreeServer):
    """Gives out anchors, makes images, and goes back to the model of the lowest loss at the end of a task.

    Attributes:
        anchors: (c, d_e) of each task's new classes, by name.
        best: the changing part of the model of the lowest loss so far in this task; `lowest` is that loss.
        ended_with: of each task that is over, the round into which its final model came.
    """

    method: LANDER
    state = ("anchors", "best", "lowest", "_best_round", "ended_with")

    def __init__(self, method: LANDER, context: Context) -> None:
        super().__init__(method, context)
        self.anchors: dict[str, torch.Tensor] = {}
        self.best: dict[str, torch.Tensor] = {}
        self.lowest, self._best_round = math.inf, 0
        self.ended_with: list[int] = []
        self._loss, self._samples = 0.0, 0

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if f"{_ANCHORS}{task.index}" not in self.anchors and self.method.maps:
            self.anchors[f"{_ANCHORS}{task.index}"] = self.method.anchors_of(task, self.context).to(self.context.device)

    def all_anchors(self) -> torch.Tensor:
        """(C, d_e) by column; a checkpoint may have its tensors in any order."""
        return torch.cat([self.anchors[f"{_ANCHORS}{task}"] for task in range(len(self.anchors))])

    def synthesise(self, task: Task) -> None:
        method, network, knobs = self.method, self.network, self.method.synthesis
        assert isinstance(network, anchored.MappedNetwork)
        inversion = anchored.AnchoredInversion(
            knobs,
            network,
            self.all_anchors(),
            method.ltc,
            method.radius,
            self.scale,
            Augment(method.training.augment),
            method.training.batch_size,
            self.trainer.autocast,
        )
        images, labels = inversion.run()
        used = len(images) if method.published else knobs.images
        self.made = {"images": images[:used], "labels": labels[:used]}

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        """The teacher, the images without their classes, and the anchors of all classes."""
        sent = super().extra_broadcast()
        sent.pop(made_prefix(self.task - 1) + "labels", None)
        return {**sent, **(self.anchors if self.method.ltc else {})}

    def broadcast(self, task: Task, round_: int) -> Message:
        message = super().broadcast(task, round_)
        if self.stage == MODEL:
            self._loss, self._samples = 0.0, 0
        return message

    def absorb(self, client: int, upload: Message) -> None:
        super().absorb(client, upload)
        if self.stage == MODEL and self.method.returns:
            self._loss += float(upload[_LOSS])
            self._samples += upload.samples or 0

    def finish_round(self) -> None:
        super().finish_round()
        if self.stage != MODEL or not self.method.returns:
            return
        # Losses are per sample, so that rounds with other participants can be compared.
        if self._samples and self._loss / self._samples < self.lowest:
            self.lowest, self._best_round = self._loss / self._samples, self._round
            self.best = dict(self.sent)
        if self._round == self.method.training.rounds - 1:
            self.network.load(self.best)
            self.ended_with.append(self._best_round)
            self.best, self.lowest, self._best_round = {}, math.inf, 0

    def model(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in super().model().items() if not name.startswith("mapping.")}

    def report(self) -> dict[str, Any]:
        """`ended_with`: of each task, the round whose incoming model became its last."""
        return {**super().report(), **({"ended_with": self.ended_with} if self.method.returns else {})}


@dataclass
class LANDER(DataFreeMethod):
    name: ClassVar[str] = "lander"
    search: ClassVar[Mapping[str, str]] = {"pre": "log(0.04,4)"}
    client_half = LANDERClient
    server_half = LANDERServer

    # The step size falls to lr times 0.025, which is 0.001.
    training: Training = field(
        default_factory=lambda: Training(
            rounds=100, epochs=2, batch_size=128, lr=0.04, momentum=0.9, schedule="cosine_decay", decay=0.025
        )
    )
    anchors: str = knob("random", filled=True, words="random, or a file")
    anchor_size: int = knob(512, least=1)
    radius: float = knob(0.015, least=0)
    ltc: float = knob(5.0, least=0)
    cur: float = knob(0.2, above=0)
    pre: float = knob(0.4, least=0)
    final: str = knob("best", choices=("best", "last"))
    synthesis: anchored.Synthesis = field(default_factory=anchored.Synthesis)
    variant: str = knob("working", choices=("working", "published"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.published:
            self.require_published(final="best", weighting="uniform")

    @property
    def replays(self) -> bool:
        return self.pre > 0

    @property
    def maps(self) -> bool:
        """Whether the network has a mapping and classes have anchors. If not, no term would use them."""
        return self.ltc > 0 or self.replays

    @property
    def returns(self) -> bool:
        return self.final == "best"

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = super().uploads(context)
        loss = {_LOSS: real(1, least=0, combine=SUM)} if self.returns else {}
        return {**stages, MODEL: {**stages[MODEL], **loss}}

    def contents(self) -> Mapping[str, str]:
        if self.anchors == "random":
            return {}
        rows = anchored.read_anchors(self.anchors, "method.anchors")
        return {"anchors": content_hash(rows.numpy().tobytes() + str(tuple(rows.shape)).encode()).hexdigest()}

    def build_network(self, context: Context) -> Network:
        if not self.maps:
            return super().build_network(context)
        return anchored.MappedNetwork(self.start(context), self.anchor_size, derived_seed(context.seed, "mapping"))

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        if self.anchors == "random":
            return
        rows, classes = anchored.read_anchors(self.anchors, "method.anchors"), context.all_classes(classes_per_task)
        if rows.shape[1] != self.anchor_size:
            raise UserError(
                f"method.anchor_size={self.anchor_size}: {self.anchors} has anchors of {rows.shape[1]} numbers",
                f"method.anchor_size={rows.shape[1]}",
            )
        if len(rows) < classes:
            raise UserError(
                f"method.anchors={self.anchors} has {len(rows)} anchors", f"one for each of {classes} classes"
            )

    def paper_bytes(self, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
        """`stsa_mib` alone, `exchanged_mib`."""
        network = self.build_network(context)
        body, row = sum(value.numel() for value in network.state().values()), network.dimension + 1
        most = context.all_classes(classes_per_task)
        seen = [min(classes, most) for classes in itertools.accumulate(classes_per_task)]
        return {"stsa_mib": self.exchanged_mib(body, row, self.start(context).size, seen)}

    def exchanged_mib(self, body: int, row: int, side: int, seen: Sequence[int]) -> float:
        """What a client exchanges after the first task, downloads and uploads, in MiB (STSA's Table 5).

        It is the model of all classes so far in every round, and once per task all kept images, with one byte per
        label.

        Args:
            body: values of the network without its head, including the mapping to anchors.
            row: values of the head per class.
            side: of the images, in pixels.
            seen: how many classes each task's model has.
        """
        images = self.synthesis.stored if self.replays else 0
        models = sum(2 * self.training.rounds * (body + row * classes) for classes in seen[1:])
        return (4 * models + (len(seen) - 1) * images * (3 * side**2 + 1)) / 2**20

    def anchors_of(self, task: Task, context: Context) -> torch.Tensor:
        """(c, d_e) of the classes that are new in a task."""
        if self.anchors == "random":
            seed = derived_seed(context.seed, "anchors") % 2**62
            return anchored.random_anchors(task.new_columns, self.anchor_size, seed)
        rows = anchored.read_anchors(self.anchors, "method.anchors")
        if task.classes and max(task.classes) >= len(rows):
            raise UserError(
                f"method.anchors={self.anchors} has {len(rows)} anchors, none for class {max(task.classes)}",
                "one for each class of the data set",
            )
        return rows[list(task.classes)]
