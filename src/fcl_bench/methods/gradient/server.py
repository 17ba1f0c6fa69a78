"""The server half of the gradient methods: federated averaging, and what a method may change about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import Flat, add_weighted, average
from fcl_bench.methods.gradient.client import MODEL, MOMENTS, ModelHolder, final_prefix, head_seed, teacher_prefix
from fcl_bench.protocol.context import Context, Prediction, Task, TestBatch
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server
from fcl_bench.randomness import derived_seed, generator
from fcl_bench.training.network import Heads

if TYPE_CHECKING:
    from fcl_bench.methods.gradient.base import GradientMethod
    from fcl_bench.methods.gradient.ccvr import CCVRHead
    from fcl_bench.methods.gradient.robust import ServerOptimiser


class GradientServer(ModelHolder, Server):
    """Averages models round by round: W = sum_k p_k W_k (FedProTIP Eq. 21), batch norm's running statistics too.

    Attributes:
        sent: the part of the model that the round at hand changes, as broadcast.
        stage: of the round at hand.
        task: index of the task at hand.
        tasks: the columns of each task's classes.
        columns: the columns of each head's.
        counted: stages whose uploads say how many samples they are of.
        replay: what predicts in place of the trained heads under `ccvr=gaussian`; None: nothing does.
    """

    method: GradientMethod
    counted: ClassVar[Sequence[str]] = (MODEL,)
    state: ClassVar[Sequence[str]] = ("tasks", "columns", "network_tensors", "replay", "_optimiser", "_teacher")

    def __init__(self, method: GradientMethod, context: Context) -> None:
        super().__init__(method, context)
        self.stage = MODEL
        self.task = 0
        self.tasks: list[tuple[int, ...]] = []
        self.columns: list[tuple[int, ...]] = []
        self.sent: dict[str, torch.Tensor] = {}
        self._round = 0
        self.replay: CCVRHead | None = None
        if method.ccvr == "gaussian":
            from fcl_bench.methods.gradient.ccvr import CCVRHead

            self.replay = CCVRHead(method.gaussian, self.start.dimension, context.device, context.sums)
        self._optimiser: ServerOptimiser | None = None
        if method.training.server_optimizer != "average":
            from fcl_bench.methods.gradient.robust import ServerOptimiser

            self._optimiser = ServerOptimiser(method.training)
        self._teacher: dict[str, torch.Tensor] = {}
        self._sums: Mapping[str, torch.Tensor] = {}
        self._weight = 0.0
        #: Of the round at hand, where `training.aggregate` looks at all models together.
        self._models: list[dict[str, torch.Tensor]] = []

    @property
    def heads(self) -> Heads:
        """The heads so far, at the last task."""
        return Heads(tuple(self.columns), self.tasks[-1])

    def start_task(self, task: Task) -> None:
        self.task = task.index
        if len(self.tasks) == task.index:
            if self.method.keeps_teacher and task.index:
                prefix = teacher_prefix(task.index - 1)
                self._teacher = {prefix + name: value.clone() for name, value in self.network.state().items()}
            self.tasks.append(task.columns)
            self.columns.append(self.method.head_columns(task))
            if self.replay:
                self.replay.weight = self.replay.bias = None  # a new task has other heads
        self.prepare(self.heads)
        self._heads_message = self.heads.to_message()

    def watched(self) -> Mapping[str, torch.Tensor]:
        return self.network.state()

    def stages(self, task: Task) -> list[str]:
        """The stage of each round of a task; overridden where the server's state decides, too."""
        return self.method.stages(task)

    def rounds(self, task: Task) -> int:
        return len(self.stages(task))

    def model_rounds(self, task: Task) -> list[int]:
        return [round_ for round_, stage in enumerate(self.stages(task)) if stage == MODEL]

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        """A random `fraction` of the clients, at least one, in the rounds of the model; everyone in others."""
        fraction = self.method.training.fraction
        if fraction == 1 or not available or self.stages(task)[round_] != MODEL:
            return available
        count = max(1, round(fraction * len(available)))
        rng = generator(self.context.seed, "participants", task.index, self.method.model_round(task, round_))
        return sorted(rng.choice(available, count, replace=False).tolist())

    def may_return(self, task: Task, refused: int, round_: int) -> bool:
        """A round of the model builds on the broadcast alone, and nothing builds on moments."""
        return self.stages(task)[refused] in (MODEL, MOMENTS)

    def broadcast(self, task: Task, round_: int) -> Message:
        """The model, the step size, the round; what no longer changes is sent to each client once."""
        self.stage = self.stages(task)[round_]
        state = {name: value.clone() for name, value in self.network.state().items()}
        changing = self.network.changing().keys()
        heads = self._heads_message
        # Moments are taken of the model alone, also by clients that have not trained in this task.
        extra = {} if self.stage == MOMENTS else self.extra_broadcast()
        if self.stage != MODEL:
            # The task's last model: named by the task, since it is sent in every such stage and counts once.
            # Before the task's first round of the model there is none.
            sent = state if self.method.model_round(task, round_) else {}
            final = {(final_prefix(task.index) + name if name in changing else name): sent[name] for name in sent}
            return Message({**final, **heads, **extra}, self.stage, cached={*final, *extra})
        self._round = self.method.model_round(task, round_)
        self._sums, self._weight, self._models = {}, 0.0, []
        self.sent = {name: state[name] for name in changing}
        rate = torch.tensor(self.method.training.rate(self._round), dtype=torch.float64)
        control = {"round": torch.tensor(self._round), "rate": rate}
        once = {*(state.keys() - self.sent.keys()), *extra}
        return Message({**state, **control, **heads, **extra}, self.stage, cached=once)

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        """What a method sends beside the model in a round of `stage`: tensors that never change under their names."""
        return dict(self._teacher)

    def matching(self, name: str) -> Mapping[str, torch.Tensor]:
        """The parts of the model that the round changes, as broadcast; of `moments`, the task's classes."""
        return self.replay.matching(self.tasks[-1]) if self.replay and self.stage == MOMENTS else self.sent

    def objection(self, upload: Message) -> str:
        if self.replay and self.stage == MOMENTS:
            return self.replay.objection(upload, self.tasks[-1])
        missing = self.stage in self.counted and upload.samples is None
        return "it does not say how many samples it is of" if missing else ""

    def absorb(self, client: int, upload: Message) -> None:
        if self.replay and self.stage == MOMENTS:
            self.replay.absorb(upload, self.tasks[-1])
        elif self.stage == MODEL:
            self.absorb_model(client, upload)
        else:
            self.absorb_answer(client, upload)

    def absorb_model(self, client: int, upload: Message) -> None:
        """Take in a client's model."""
        weight = self.weight(client, upload)
        if not 0 <= weight < math.inf:
            raise UserError(
                f"{type(self).__name__}.weight of client {client} is {weight}", "a finite number, 0 or more"
            )
        self._weight += weight
        if self.method.training.aggregate != "mean":
            self._models.append({name: upload[name].to(torch.float32, copy=True) for name in self.sent})
            return
        model = upload.tensors if isinstance(upload.tensors, Flat) else {name: upload[name] for name in self.sent}
        # In the sum of all uploads the models have their weights already.
        self._sums = add_weighted(self._sums, model, 1.0 if self.context.sums else weight)

    def absorb_answer(self, client: int, upload: Message) -> None:
        """Take in an upload of a stage that is no training; only for methods with such stages."""

    def weight(self, client: int, upload: Message) -> float:
        """What a client's model counts in the average, relative to the others'; of a sum, all of them together."""
        return upload.weight(self.method.training.weighting)

    def finish_round(self) -> None:
        if self.replay and self.stage == MOMENTS:
            self._retrain_heads(self.replay)
        elif self.stage != MODEL:
            self.finish_stage()
        elif self._weight or self._models:
            new = self._combined() if self._models else average(self._sums, self._weight)
            frozen = self.frozen_rows() if self.method.frozen_heads else {}
            if self._optimiser:
                new = self._optimiser.step(self.sent, new, frozen)
            new = self.aggregated(new)
            for name, rows in frozen.items():  # noise, 16-bit wires and optimisers move them
                new[name] = new[name].clone()
                new[name][rows] = self.sent[name][rows].to(new[name])
            self.network.load(new)
            with self.trainer.reproducible(derived_seed(self.context.seed, "server", self.task, self._round)):
                self.server_step()
        self._sums, self._models = {}, []

    def frozen_rows(self) -> dict[str, list[int]]:
        """Rows that do not train in the task, by parameter: of other classes, in heads that train for old ones."""
        return {name: rows for name, rows in self.heads.frozen_rows.items() if name in self.sent}

    def _combined(self) -> dict[str, torch.Tensor]:
        """One model of all those of the round, not their mean."""
        from fcl_bench.methods.gradient.robust import combined, weakness

        knobs = self.method.training
        if text := weakness(len(self._models), knobs, self.method.training_key):
            self._notices.tell(knobs.aggregate, text)
        statistics = {name for name, _ in self.network.named_buffers()}
        return combined(self._models, knobs.aggregate, knobs.trimmed, knobs.byzantine, statistics)

    def _retrain_heads(self, replay: CCVRHead) -> None:
        """Make the heads that predict."""
        if self.task and any(name.startswith("body.") for name in self.network.changing()):
            self._notices.tell(
                "ccvr",
                "method.ccvr=gaussian: the features train, and the moments of earlier tasks' classes are of the"
                " features that they had",
            )
        seed = derived_seed(self.context.seed, "replay head", self.task) % 2**62
        with self.trainer.reproducible(seed):
            replay.retrain(self.network, self.heads, seed)

    def finish_stage(self) -> None:
        """Called when all uploads of a stage that is no training are in."""

    def aggregated(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The new model from what the server's optimiser made of the clients'; `sent` is the old one."""
        return mean

    def server_step(self) -> None:
        """What the server does to `network` or beside it after each average, with torch's generators seeded."""

    def finish_task(self) -> None:
        """The model of the last round is the task's."""

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.classify(TestBatch.of(inputs)).scores

    def classify(self, batch: TestBatch) -> Prediction:
        return Prediction(self.heads.class_scores(self.logits(self.embed(batch.inputs))))

    @torch.inference_mode()
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """The outputs of all heads (n, L). Raises a `UserError` where they are not finite."""
        if self.replay is None or self.replay.weight is None:
            logits = self.network.logits(features)
        else:
            logits = torch.nn.functional.linear(features, self.replay.weight, self.replay.bias)
        if not bool(torch.isfinite(logits).all()):
            raise self.trainer.diverged()
        return logits

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.trainer.features(self.network, inputs)

    def model(self) -> dict[str, torch.Tensor]:
        """`W` (d, C), `bias` (C), the body's tensors and a method's own; features are the body's output.

        If a class has several heads, `W` has a column for each, and `head_columns` says which class it scores.
        """
        state, heads = self.network.state_dict(), self.heads
        own = {} if heads.plain else {"head_columns": torch.tensor(heads.logits)}
        weight, bias = self.network.classifier()
        if self.replay and self.replay.weight is not None and self.replay.bias is not None:
            weight, bias = self.replay.weight, self.replay.bias
        return {
            "W": weight.T,
            "bias": bias,
            **own,
            **{name: v for name, v in state.items() if not name.startswith("heads.") and v.is_floating_point()},
        }

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        self.tasks = [task.columns for task in tasks]
        self.columns = [self.method.head_columns(task) for task in tasks]
        self.method.grow(self.network, self.heads.sizes, head_seed(self.context))
        self.network.load_known(model)
        weight, bias = model["W"].T, model["bias"]
        if self.replay is None:
            self.network.load_classifier(weight, bias)
        else:
            self.replay.weight, self.replay.bias = weight, bias

    def _state_names(self) -> list[str]:
        # Checkpoints of runs without it say nothing of it.
        return [name for name in super()._state_names() if name != "replay" or self.replay]

    @property
    def network_tensors(self) -> dict[str, torch.Tensor]:
        """The network's tensors, for a checkpoint; setting them makes the heads so far."""
        return dict(self.network.state())

    @network_tensors.setter
    def network_tensors(self, saved: dict[str, torch.Tensor]) -> None:
        self.method.grow(self.network, self.heads.sizes, head_seed(self.context))
        self.network.load_known(saved)
