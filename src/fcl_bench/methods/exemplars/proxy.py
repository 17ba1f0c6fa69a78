"""The proxy server of GLFC and LGA: it chooses the old model by images that it reconstructs from clients' gradients.

A client with a signal sends, beside its model, a gradient for each of its classes: that of a small encoder's
cross-entropy at the sample nearest to the class's mean, perturbed (`exemplars.inversion`). The server reads off the
class, reconstructs the image, and keeps the last iterates as its monitor set. After each round it tests the averaged
model on them; the best model of a task is the old model of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, normalize, one_hot

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment, Augmentation
from fcl_bench.environment import exact_kernels
from fcl_bench.linalg.gram import class_sums
from fcl_bench.methods.exemplars.inversion import GradientEncoder, pixel_bytes, reconstruct
from fcl_bench.methods.exemplars.memory import ExemplarClient, ExemplarServer
from fcl_bench.methods.gradient.client import MODEL, teacher_prefix
from fcl_bench.protocol import compute
from fcl_bench.protocol.context import ClientData, Context, Task
from fcl_bench.protocol.fields import Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Picture
from fcl_bench.randomness import derived_seed

if TYPE_CHECKING:
    from fcl_bench.methods.exemplars.glfc import GLFC

#: Images at a time.
_BATCH = 64


def monitor_accuracy(
    images: torch.Tensor,
    labels: torch.Tensor,
    scores: Callable[[torch.Tensor], torch.Tensor],
    augment: Augmentation,
    seed: int,
) -> float:
    """The share of the augmented images that a model classifies rightly; all images count.

    Args:
        images: (n, 3, h, w) uint8, at least one.
        labels: (n,) columns.
        scores: (b, 3, h, w) uint8 to (b, C) of all columns.
        augment: as in training.
        seed: of what it draws.
    """
    generator, right = torch.Generator().manual_seed(seed), 0
    with torch.inference_mode():
        for batch, wanted in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
            right += int((scores(augment(batch, generator)).argmax(dim=1) == wanted).sum())
    return right / len(labels)


class BestModels:
    """The best model of the last task (GLFC's b1) and that of the task at hand (b2), by the monitor's accuracy.

    Attributes:
        last: b1, tensors by name; empty: there is none.
        best: b2. A task without gradients has none.
        performance: of b2, what a model has to reach to replace it.
    """

    state = ("last", "best", "performance")

    def __init__(self) -> None:
        self.last: dict[str, torch.Tensor] = {}
        self.best: dict[str, torch.Tensor] = {}
        self.performance = 0.0

    def begin(self) -> None:
        self.last, self.best, self.performance = self.best, {}, 0.0

    def offer(self, model: Mapping[str, torch.Tensor], performance: float) -> None:
        """Copy the model with this `performance` if it becomes the best."""
        if performance >= self.performance:
            self.performance = performance
            self.best = {name: value.detach().clone() for name, value in model.items()}


#: In uploads: (p, c), a column for each class. In broadcasts: the seed of the encoder.
GRADIENTS, ENCODER = "gradients", "encoder"
#: Weight decay and rate of the perturbation, as published; the rate is a share of the clients'.
_WEIGHT_DECAY, _RATE = 1e-5, 0.1
#: Reconstructed images of each task that a run's picture shows.
_PICTURED = 16


@dataclass
class Inversion:
    """`method.inversion`: the prototypes' gradients, and what the server makes of them, see conf/method/glfc.yaml."""

    perturbation: int = knob(50, least=0)
    iterations: int = knob(250, least=1)
    lr: float = knob(0.1, above=0)
    images: int = knob(20, least=1)


@lru_cache(maxsize=2)
def encoder(side: int, columns: int, seed: int, device: torch.device) -> GradientEncoder:
    """The encoder for `columns` classes, the same for all clients and rounds of a task."""
    return GradientEncoder((side, side), columns, seed, device=device)


def nearest_to_means(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample of each class whose direction phi / |phi| is nearest to the mean direction of the class.

    The mean is not normalised again, as in GLFC's code. Ties go to the lower index.

    Args:
        features: (n, d) phi.
        labels: (n,) columns.

    Returns:
        (c,) the classes that have samples, ascending, and (c,) the index of each one's sample.
    """
    phi = normalize(features.double(), dim=1)
    columns, which = labels.unique(return_inverse=True)
    counts = torch.bincount(which, minlength=len(columns))
    means = (class_sums(phi, which, len(columns)) / counts).T
    distances = torch.linalg.vector_norm(phi - means[which], dim=1)
    least = distances.new_full((len(columns),), torch.inf).scatter_reduce(0, which, distances, "amin")
    order = torch.arange(len(labels), device=labels.device)
    candidates = torch.where(distances == least[which], order, len(labels))
    first = torch.full_like(columns, len(labels)).scatter_reduce(0, which, candidates, "amin")
    return columns, first


def perturbed(
    images: torch.Tensor,
    targets: torch.Tensor,
    scores: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    rate: float,
    weight_decay: float,
) -> torch.Tensor:
    """Each image after `steps` of gradient descent on its mean BCE(scores(x), target): towards confidence.

    x <- x - rate (d BCE / d x + weight_decay x), every image for itself. Pixels may leave 0..1.

    Args:
        images: (n, 3, h, w) with pixels from 0 to 1; stay as they are.
        targets: (n, C) one-hot.
        scores: images to logits (n, C), each by itself: a network in evaluation mode.
        steps, rate, weight_decay: GLFC's are 50, a tenth of the learning rate, 1e-5.

    Returns:
        (n, 3, h, w).
    """
    found = images.detach().clone()
    compute.count(steps=steps * len(images))
    for _ in range(steps):
        found.requires_grad_()
        logits = scores(found)
        # The loss is a mean over classes and a sum over images, so no image depends on how many others there are.
        loss = binary_cross_entropy_with_logits(logits, targets, reduction="sum") / logits.shape[1]
        (slope,) = torch.autograd.grad(loss, found)
        found = (found.detach() * (1 - rate * weight_decay)).sub_(slope, alpha=rate)
    return found.detach()


class PrototypeClient(ExemplarClient):
    """Differentiates a perturbed prototype of each of its classes."""

    method: GLFC

    def gradients(self, client_data: ClientData, broadcast: Message, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(p, c) of the shard's classes, ascending, and (n,) whose class's gradient each sample is in, -1 for none."""
        scale, knobs = self.scale, self.method.inversion
        over = encoder(scale.size, columns, int(broadcast[ENCODER]), self.context.device)
        classes, which = nearest_to_means(self.trainer.features(self.network, client_data.inputs), client_data.labels)
        self.network.eval()

        with exact_kernels():
            images = perturbed(
                scale.scaled(client_data.inputs[which]),
                one_hot(classes, columns).float(),
                lambda pixels: self.network(scale.pixels(pixels)),
                knobs.perturbation,
                _RATE * self.method.training.lr,
                _WEIGHT_DECAY,
            )
            return over.gradients(images, classes).T, torch.full_like(client_data.labels, -1).scatter(0, which, classes)


class ProxyServer(ExemplarServer):
    """Averages models, and picks the best by its monitor set.

    Attributes:
        best: the best models of the last task and of the task at hand.
        images, labels: (n, 3, size, size) uint8 and (n,) the monitor set; its classes were read off gradients.
        monitored: of which task it is; -1: there is none yet.
        received: gradients of single samples so far.
    """

    method: GLFC
    state: ClassVar[Sequence[str]] = ("best", "images", "labels", "monitored", "received", "_shown")

    def __init__(self, method: GLFC, context: Context) -> None:
        super().__init__(method, context)
        side = self.scale.size
        self.best = BestModels()
        self.images = torch.zeros(0, 3, side, side, dtype=torch.uint8, device=context.device)
        self.labels = torch.zeros(0, dtype=torch.int64, device=context.device)
        self.monitored, self.received = -1, 0
        self._seed = derived_seed(context.seed, "encoder")
        self._augment = Augment(method.training.augment)
        #: Of the round at hand: (c, p) of each client with a signal.
        self._gradients: list[torch.Tensor] = []
        self._shown = {"images": self.images, "labels": self.labels, "tasks": self.labels}

    def start_task(self, task: Task) -> None:
        begins = len(self.tasks) == task.index
        super().start_task(task)
        if not begins:
            return
        self.best.begin()
        if self._teacher and self.best.last:
            prefix = teacher_prefix(task.index - 1)
            self._teacher = {prefix + name: value for name, value in self.best.last.items()}

    @property
    def encoder(self) -> GradientEncoder:
        """The encoder with a row for each class so far."""
        return encoder(self.scale.size, len(self.heads.logits), self._seed, self.context.device)

    # What travels -----------------------------------------------------------------------------------------------------

    def broadcast(self, task: Task, round_: int) -> Message:
        self._gradients = []
        return super().broadcast(task, round_)

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        own = {ENCODER: torch.tensor(self._seed)} if self.stage == MODEL else {}
        return {**super().extra_broadcast(), **own}

    def schema(self, task: Task, stage: str) -> Schema:
        found = super().schema(task, stage)
        if GRADIENTS not in found:
            return found
        gradients = found[GRADIENTS].sized({"p": self.encoder.numbers})
        return {**found, GRADIENTS: replace(gradients, widest=len(task.columns))}

    def absorb(self, client: int, upload: Message) -> None:
        super().absorb(client, upload)
        if GRADIENTS in upload:
            self._gradients.append(upload[GRADIENTS].T.float())

    # The choice -------------------------------------------------------------------------------------------------------

    def server_step(self) -> None:
        """Look at the gradients that came in, and at the new average."""
        if self._gradients:
            self._reconstruct(torch.cat(self._gradients))
            self._gradients = []
        if len(self.labels) and self.monitored == self.task:
            self.best.offer(self.network.state(), self.accuracy())

    def _reconstruct(self, gradients: torch.Tensor) -> None:
        """Make the monitor set, or add to that of the task at hand."""
        knobs = self.method.inversion
        seed = derived_seed(self.context.seed, "reconstruction", self.task, self._round)
        found = reconstruct(self.encoder, gradients, seed, knobs.lr, knobs.iterations, knobs.images)
        images = pixel_bytes(found.images)
        labels = found.labels.repeat_interleave(images.shape[1])
        self.received += len(gradients)
        self._show(images[:, -1], found.labels)
        if self.monitored != self.task:
            self.images, self.labels, self.monitored = images.flatten(0, 1), labels, self.task
            return
        self.images, self.labels = torch.cat([self.images, images.flatten(0, 1)]), torch.cat([self.labels, labels])
        # The best model so far has to be beaten on the new images too.
        if self.best.best:
            now = {name: value.clone() for name, value in self.network.state().items()}
            self.network.load(self.best.best)
            self.best.performance = self.accuracy()
            self.network.load(now)

    def accuracy(self) -> float:
        """The share of the monitor set that `network` classifies rightly."""
        return monitor_accuracy(
            self.images,
            self.labels,
            lambda images: self.network.logits(self.trainer.features(self.network, images)),
            self._augment,
            derived_seed(self.context.seed, "monitor", self.task, self._round),
        )

    # What it tells ----------------------------------------------------------------------------------------------------

    def _show(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        room = _PICTURED - int((self._shown["tasks"] == self.task).sum())
        new = {"images": images[:room], "labels": labels[:room], "tasks": torch.full_like(labels[:room], self.task)}
        self._shown = {name: torch.cat([before, new[name]]) for name, before in self._shown.items()}

    def pictures(self) -> dict[str, Picture]:
        if not len(self._shown["labels"]):
            return super().pictures()
        return {**super().pictures(), "reconstructed": Picture(**self._shown)}

    def gates(self) -> dict[str, str]:
        if self.task == 0 or self.monitored > 0:
            return {}
        return {"idle_term": "no client has noticed new classes since the first task"}

    def privacy(self) -> dict[str, int]:
        """Each gradient is that of one (perturbed) sample, and an image of it is reconstructed."""
        counts = {"sample_gradients": self.received, "reconstructed_images": self.received}
        return {**super().privacy(), **counts}
