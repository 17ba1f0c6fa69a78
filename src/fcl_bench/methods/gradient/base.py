"""What `method=...` names where the network trains: the knobs of federated averaging over a stream of tasks."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fcl_bench.backbones.backbone import Trainable, frozen_names
from fcl_bench.config import knob, text
from fcl_bench.errors import UserError, choices, require_memory
from fcl_bench.methods.gradient.client import MODEL, MOMENTS, GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.fields import EACH, MEAN, Schema, weights
from fcl_bench.protocol.method import Client, Method, Server
from fcl_bench.training.knobs import Gaussian, Training
from fcl_bench.training.network import Network, feature_start

#: `GradientMethod.aggregation`, beside MEAN and EACH.
ONLY_MEAN = "only mean"
#: The methods with `compiles`, for messages.
_COMPILE = ("fedavg", "fedprox", "scaffold", "feddyn", "feddisco", "centralised")


@dataclass
class GradientMethod(Method):
    """A method that trains the network over rounds.

    Attributes:
        network_class: makes the network, with heads of its kind.
        training_key: where the user sets `training`, for messages.
        inside_transformers: whether it trains parts inside a frozen vision transformer, and takes no other network.
        aggregation: what its server makes of clients' models. MEAN: their mean by `training.weighting`, or a robust
            aggregate in its place (`training.aggregate`). ONLY_MEAN: the mean, since the new model depends on something
            else, too. EACH: it looks at each of them.
        averaged_with: of EACH, the knobs with which the mean is enough.
        compiles: whether its steps use nothing of the network but outputs and gradients, so that the body may run
            compiled (`backbone.compile`).
        keeps_teacher: whether clients get the last task's model, to be held to what it knew (`GradientClient.teacher`).
    """

    client_half: ClassVar[type[GradientClient]] = GradientClient
    server_half: ClassVar[type[GradientServer]] = GradientServer
    network_class: ClassVar[type[Network]] = Network
    resumes_within_tasks: ClassVar[bool] = True
    training_key: ClassVar[str] = "method.training"
    inside_transformers: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    keeps_teacher: ClassVar[bool] = False
    aggregation: ClassVar[str] = MEAN
    averaged_with: ClassVar[str] = ""
    #: The common part of every search over methods that train.
    search: ClassVar[Mapping[str, str]] = {
        "training.lr": "log(1e-3,0.3)",
        "training.momentum": "0,0.9",
        "loss_classes": "seen,task",
    }

    training: Training = field(default_factory=lambda: Training(momentum=0.9))
    frozen_stages: int = knob(0, least=0)
    frozen_heads: bool = False
    loss_classes: str = knob("task", choices=("seen", "task"))
    trains: str = knob("images", choices=("images", "features"))
    ccvr: str = knob("none", choices=("none", "gaussian"))
    gaussian: Gaussian = knob(Gaussian, of="ccvr=gaussian")

    def __post_init__(self) -> None:
        self.training.check(self.training_key)

    def require(self, why: str, otherwise: str = "", **only: Any) -> None:
        """Raise a `UserError` for the first of these knobs that has another value than the one that is needed.

        Args:
            why: what follows the knob and its value in the message.
            otherwise: what else would work, to follow the value needed.
            only: the values needed, by knob of the method or of `training`.
        """
        for name, wanted in only.items():
            inside = name in vars(self.training)
            key = f"{self.training_key}.{name}" if inside else f"method.{name}"
            if (value := getattr(self.training if inside else self, name)) != wanted:
                typed, fitting = (text(own) or "null" for own in (value, wanted))
                raise UserError(f"{key}={typed}{why}", f"{key}={fitting}{otherwise}")

    def require_published(self, **only: Any) -> None:
        """Raise a `UserError` for a knob whose value is not that of the public code, with `variant=published`."""
        self.require(" contradicts method.variant=published", **only)

    @property
    def trains_network(self) -> bool:
        return self.trains == "images"

    @property
    def weighting(self) -> str:
        return self.training.weighting

    @property
    def published(self) -> bool:
        """Whether a method with the knob `variant` does as its public code does."""
        return getattr(self, "variant", "") == "published"

    def sizes(self, context: Context) -> Mapping[str, int]:
        """See `Method`; "d" is the number of features that the network's body has."""
        return {"d": self.start(context).dimension}

    def uploads(self, context: Context) -> dict[str, Schema]:
        """The model in its rounds; a method adds the fields and stages that it has besides."""
        models = weights(combine=MEAN)
        if self.aggregation == EACH:
            models = weights(combine=EACH, otherwise=self.averaged_with)
        elif self.training.aggregate != "mean":
            models = weights(combine=EACH, otherwise=f"{self.training_key}.aggregate=mean")
        stages: dict[str, Schema] = {MODEL: {"*": models}}
        if self.ccvr == "gaussian":
            from fcl_bench.methods.gradient.ccvr import moments_schema

            stages[MOMENTS] = moments_schema(self.gaussian, context.sums)
        return stages

    def start(self, context: Context) -> Trainable:
        """What training starts from."""
        if not self.trains_network:
            return feature_start(context.inputs)
        assert context.network is not None
        return context.network

    def build_network(self, context: Context) -> Network:
        """A new network before its first head, the same at every call; a method may add prompts or adapters to it."""
        return self.network_class(self.start(context))

    def grow(self, network: Network, sizes: list[int], seed: int) -> None:
        """Give the network one head for each task so far, the same in both halves; a method may add more.

        Args:
            sizes: classes of each task's head.
            seed: of the new weights.
        """
        network.grow(sizes, seed)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        start = self.start(context)
        if start.compiled and not self.compiles:
            raise UserError(
                f"backbone.compile=true: method={self.name} looks into the network, or runs copies of it",
                f"backbone.compile=false, or a method that does not: {', '.join(_COMPILE)}",
            )
        if self.inside_transformers:
            what = f": method={self.name} trains a part of its own inside the network, and nothing else of it"
            self.require(what, trains="images", frozen_stages=0)
            self.build_network(context)
        if self.training.aggregate != "mean":
            self._check_aggregate(context, context.all_classes(classes_per_task))
        if self.training.rates:
            self._check_rates(context, classes_per_task)
        frozen_names(start.build(), start.stages, self.frozen_stages)
        if self.ccvr == "gaussian" and self.gaussian.covariance == "full":
            size = 8 * context.all_classes(classes_per_task) * start.dimension**2
            require_memory("method.gaussian.covariance=full", size, "the covariances of all classes")

    def _check_aggregate(self, context: Context, classes: int) -> None:
        """Check the memory: robust aggregates keep all models of a round in float32, and one more to compare."""
        key, training = f"{self.training_key}.aggregate={self.training.aggregate}", self.training
        if self.aggregation != MEAN:
            what = f"the new model of method={self.name} depends on more than an aggregate of the clients' models"
            self.require(f": {what}", aggregate="mean")
        network = self.build_network(context)
        self.grow(network, [classes], seed=0)
        models = 2 + round(training.fraction * (context.clients or 1))
        size = 4 * models * sum(value.numel() for value in network.changing().values())
        require_memory(key, size, "the models of a round")

    def _check_rates(self, context: Context, classes_per_task: list[int]) -> None:
        network = self.build_network(context)
        self.grow(network, classes_per_task, seed=0)
        names = [name for name, _ in network.named_parameters() if name not in network.never_trains]
        parts = {".".join(name.split(".")[: 2 if name.startswith("body.") else 1]) for name in names}
        for prefix, rate in self.training.rates.items():
            if not any(name.startswith(prefix) for name in names):
                key = f"{self.training_key}.rates.{prefix}={rate:g}"
                raise UserError(f"{key}: no parameter that trains has such a name", choices(parts, prefix))

    def stages(self, task: Task) -> list[str]:
        """The ledger's stages of a task's rounds, in order: those of the model, and others before or after them."""
        return [MODEL] * self.training.rounds + ([MOMENTS] if self.ccvr == "gaussian" else [])

    def model_round(self, task: Task, round_: int) -> int:
        """The number of a round among the task's rounds of the model, whatever stages come before them."""
        return self.stages(task)[:round_].count(MODEL)

    def head_columns(self, task: Task) -> tuple[int, ...]:
        """The columns that a task's new head scores."""
        return tuple(task.new_columns)

    def frozen(self, network: Network, task: int, reused: Container[int] = frozenset()) -> set[str]:
        """Names of the parameters that do not train in a task; both halves know this rule.

        Args:
            reused: earlier heads that score classes of the task.
        """
        names: set[str] = set()
        if task == 0:
            return names
        if self.frozen_stages:
            names |= {f"body.{name}" for name in frozen_names(network.body, network.stages, self.frozen_stages)}
        if self.frozen_heads:
            old = [head for head in range(len(network.heads)) if head != task and head not in reused]
            names |= {f"heads.{head}.{own}" for head in old for own, _ in network.heads[head].named_parameters()}
        return names

    def client(self, context: Context) -> Client:
        return self.client_half(self, context)

    def server(self, context: Context) -> Server:
        return self.server_half(self, context)
