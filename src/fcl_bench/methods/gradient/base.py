"""What the gradient methods share: clients train the network, the server averages their models (FedAvg)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fcl_bench.backbones.trainable import Trainable, frozen_names
from fcl_bench.errors import require_choice, require_count
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Method, Prediction, Problem, Server, Shard
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import derived_seed, generator
from fcl_bench.training.heads import Heads
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import Objective, Trainer, Training, average

#: The stage of the rounds in which models travel.
MODEL = "model"


@dataclass
class GradientMethod(Method):
    """A method that trains the network over rounds.

    Args:
        training: rounds, local epochs, optimiser, augmentation.
        frozen_stages: first stages of the network that stay as the first task leaves them.
        frozen_heads: whether the class weights of old tasks stay as they are.
        loss_over: whose scores compete in the loss: seen (all classes so far), task (the task's own).
    """

    trains_network: ClassVar[bool] = True
    resumes_within_tasks: ClassVar[bool] = True

    training: Training = field(default_factory=Training)
    frozen_stages: int = 0
    frozen_heads: bool = False
    loss_over: str = "seen"

    def __post_init__(self) -> None:
        self.training.check("method.training")
        require_count("method.frozen_stages", self.frozen_stages, least=0)
        require_choice("method.loss_over", self.loss_over, ["seen", "task"])

    def check(self, problem: Problem, classes_per_task: list[int]) -> None:
        frozen_names(start_of(problem).build(), start_of(problem).stages, self.frozen_stages)

    def stages(self, task: Task) -> list[str]:
        """The ledger's stages of a task's rounds, in order."""
        return [MODEL] * self.training.rounds

    def head_columns(self, task: Task) -> tuple[int, ...]:
        """The columns that the head which a task adds scores."""
        return tuple(task.new_columns)

    def frozen(
        self, network: Network, stages: tuple[str, ...], task: int, reused: Container[int] = frozenset()
    ) -> set[str]:
        """Names of the parameters that do not train in a task; both halves know this rule.

        Args:
            network: with the task's head.
            stages: of its body.
            task: index of the task.
            reused: earlier heads that score classes of the task.
        """
        names: set[str] = set()
        if task == 0:
            return names
        if self.frozen_stages:
            names |= {f"body.{name}" for name in frozen_names(network.body, stages, self.frozen_stages)}
        if self.frozen_heads:
            heads = ((name, _head_of(name)) for name, _ in network.named_parameters())
            names |= {name for name, head in heads if head not in (None, task) and head not in reused}
        return names

    def client(self, problem: Problem) -> GradientClient:
        return GradientClient(self, problem)

    def server(self, problem: Problem) -> GradientServer:
        return GradientServer(self, problem)


def _head_of(name: str) -> int | None:
    """The task whose head a parameter belongs to; None for the body's."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "heads" else None


def _parts(columns: torch.Tensor, sizes: list[int]) -> list[tuple[int, ...]]:
    return [tuple(part.tolist()) for part in columns.split(sizes)]


def start_of(problem: Problem) -> Trainable:
    """What training starts from."""
    assert problem.network is not None
    return problem.network


def head_seed(problem: Problem) -> int:
    """Of the new class weights; both halves draw the same, so that old ones need not be sent."""
    return derived_seed(problem.seed, "heads") % 2**62


def final_prefix(task: int) -> str:
    """Before the names of a task's last model in the stages after training."""
    return f"final.{task}."


class _Half:
    """The network in one half's hands, with what runs it."""

    def __init__(self, method: GradientMethod, problem: Problem) -> None:
        start = start_of(problem)
        self.method = method
        self.problem = problem
        layout = torch.channels_last
        self.network: Network = Network(start).to(problem.device, memory_format=layout)  # type: ignore[call-overload]
        self.trainer = Trainer(method.training, start.size, start.mean, start.std, problem.device)

    def prepare(self, heads: Heads) -> None:
        """Give the network its heads so far, and freeze what the task of the last one does not train."""
        self.network.grow(heads.sizes, head_seed(self.problem))
        stages, task = start_of(self.problem).stages, len(heads.columns) - 1
        self.network.freeze(self.method.frozen(self.network, stages, task, heads.reused))


class GradientClient(Client):
    """Trains the broadcast model on its own samples. Keeps nothing: the network is overwritten in every round."""

    def __init__(self, method: GradientMethod, problem: Problem) -> None:
        self.half = _Half(method, problem)

    def update(self, shard: Shard, broadcast: Message) -> Message:
        """What training changed of the model, and the number of samples; or the answer of another stage."""
        half = self.half
        self.take_over(shard, broadcast)
        if "rate" not in broadcast:
            return self.answer(shard, broadcast)
        half.trainer.train(
            half.network,
            shard.inputs,
            shard.labels,
            float(broadcast["rate"]),
            derived_seed(half.problem.seed, "training", shard.task, int(broadcast["round"]), shard.client),
            self.objective(shard, broadcast),
        )
        return Message({**half.network.changing(), "samples": torch.tensor(len(shard.labels))})

    def answer(self, shard: Shard, broadcast: Message) -> Message:
        """The upload of a stage that is no training, under the broadcast model; only for methods with such stages."""
        return Message({})

    def take_over(self, shard: Shard, broadcast: Message) -> None:
        """Bring the network to the broadcast model."""
        half = self.half
        half.prepare(Heads.from_message(broadcast))
        own = half.network.state_dict()
        sent = {name.removeprefix(final_prefix(shard.task)): value for name, value in broadcast.items()}
        half.network.load({name: value for name, value in sent.items() if name in own})

    def objective(self, shard: Shard, broadcast: Message) -> Objective:
        """What this round minimises."""
        method = self.half.method
        return Objective(Heads.from_message(broadcast), method.loss_over, method.frozen_heads)


class GradientServer(Server):
    """Averages models round by round: W = sum_k p_k W_k (FedProTIP Eq. 21), batch norm's running statistics too.

    Attributes:
        sent: the part of the model that the round at hand changes, as broadcast.
        task: index of the task at hand.
        tasks: the columns of each task's classes.
        columns: the columns of each head's.
    """

    def __init__(self, method: GradientMethod, problem: Problem) -> None:
        self.half = _Half(method, problem)
        self.method = method
        self.problem = problem
        self.task = 0
        self.tasks: list[tuple[int, ...]] = []
        self.columns: list[tuple[int, ...]] = []
        self.sent: dict[str, torch.Tensor] = {}
        self._stages: list[str] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._weight = 0.0

    @property
    def network(self) -> Network:
        return self.half.network

    @property
    def heads(self) -> Heads:
        """The heads so far, at the last task."""
        return Heads(tuple(self.columns), self.tasks[-1])

    def start_task(self, task: Task) -> None:
        self.task = task.index
        if len(self.tasks) == task.index:
            self.tasks.append(task.columns)
            self.columns.append(self.method.head_columns(task))
        self._stages = self.method.stages(task)
        self.half.prepare(self.heads)

    def rounds(self, task: Task) -> int:
        return len(self.method.stages(task))

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        """A random `fraction` of the clients, at least one, in the rounds of the model; everyone in others."""
        fraction = self.method.training.fraction
        if fraction == 1 or not available or self.method.stages(task)[round_] != MODEL:
            return available
        count = max(1, round(fraction * len(available)))
        drawn = generator(self.problem.seed, "participants", task.index, round_).choice(available, count, replace=False)
        return sorted(drawn.tolist())

    def broadcast(self, task: Task, round_: int) -> Message:
        """The model, the step size, the round; what no longer changes is sent to each client once."""
        self.stage = self._stages[round_]
        state = {name: value.clone() for name, value in self.network.state().items()}
        changing = self.network.changing().keys()
        heads = self.heads.to_message()
        extra = self.extra_broadcast()
        if self.stage != MODEL:
            # The task's last model: named by the task, since it is sent in every such stage and counts once.
            final = {(final_prefix(task.index) + name if name in changing else name): state[name] for name in state}
            return Message({**final, **heads, **extra}, kept={*final, *extra})
        self._sums, self._weight = {}, 0.0
        self.sent = {name: state[name] for name in changing}
        rate = torch.tensor(self.method.training.rate(round_), dtype=torch.float64)
        control = {"round": torch.tensor(round_), "rate": rate}
        return Message({**state, **control, **heads, **extra}, kept={*(state.keys() - self.sent.keys()), *extra})

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        """What a method sends beside the model in a round of `stage`: tensors that never change under their names."""
        return {}

    def absorb(self, client_id: int, message: Message) -> None:
        if self.stage == MODEL:
            self._add(message)
        else:
            self.absorb_answer(client_id, message)

    def absorb_answer(self, client_id: int, message: Message) -> None:
        """Take in an upload of a stage that is no training; only for methods with such stages."""

    def _add(self, message: Message) -> None:
        samples = float(message["samples"])
        weight = samples if self.method.training.weighting == "samples" else 1.0
        self._weight += weight
        for name in self.sent:
            value = message[name].double()
            if name in self._sums:
                self._sums[name].add_(value, alpha=weight)
            else:
                self._sums[name] = value * weight

    def finish_round(self) -> None:
        if self.stage != MODEL:
            self.finish_stage()
        elif self._weight:
            self.network.load(self.aggregated(average(self._sums, self._weight)))
        self._sums = {}

    def finish_stage(self) -> None:
        """All uploads of a stage that is no training are in."""

    def aggregated(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The new model from the mean of the clients'; `sent` is the old one."""
        return mean

    def finish_task(self) -> None:
        """The model of the last round is the task's."""

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.classify(inputs).scores

    def classify(self, inputs: torch.Tensor, one_task: bool = False) -> Prediction:
        return Prediction(self.class_scores(self.embed(inputs)))

    @torch.inference_mode()
    def class_scores(self, features: torch.Tensor) -> torch.Tensor:
        """Scores (n, C_t) of features (n, d); of a class with several heads the largest."""
        return self.heads.class_scores(self.logits(features))

    @torch.inference_mode()
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """The outputs of all heads (n, L). Raises a `UserError` where they are not finite."""
        logits = self.network.logits(features)
        if not bool(torch.isfinite(logits).all()):
            raise self.method.training.diverged()
        return logits

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.half.trainer.features(self.network, inputs)

    def model(self) -> dict[str, torch.Tensor]:
        """`W` (d, C), `bias` (C) and the body's tensors; features are the body's output.

        Where a class has several heads, a column for each, and `head_columns` says which class it scores.
        """
        state, heads = self.network.state_dict(), self.heads
        own = {} if heads.plain else {"head_columns": torch.tensor(heads.logits)}
        return {
            "W": torch.cat([state[f"heads.{head}.weight"] for head in range(len(self.columns))]).T,
            "bias": torch.cat([state[f"heads.{head}.bias"] for head in range(len(self.columns))]),
            **own,
            **{name: value for name, value in state.items() if name.startswith("body.") and value.is_floating_point()},
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {**self.network.state(), "classes": torch.tensor(self.heads.sizes)}
        if not (self.heads.plain and self.tasks == self.columns):
            state["head_columns"] = torch.tensor(self.heads.logits)
            state["task_sizes"] = torch.tensor([len(columns) for columns in self.tasks])
            state["task_columns"] = torch.tensor([column for columns in self.tasks for column in columns])
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        sizes = state["classes"].tolist()
        self.columns = _parts(state.get("head_columns", torch.arange(sum(sizes))), sizes)
        self.tasks = list(self.columns)
        if "task_sizes" in state:
            self.tasks = _parts(state["task_columns"], state["task_sizes"].tolist())
        self.network.grow(self.heads.sizes, head_seed(self.problem))
        self.network.load({name: value for name, value in state.items() if name.startswith(("body.", "heads."))})
