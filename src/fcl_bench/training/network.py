"""The network that clients train and the server averages: a body, and heads that grow with the classes.

Classes may come back in later tasks: `Heads` says which classes each head scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.protocol.compute import FORWARD, TALLY, TRAINED, uncounted
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import seeded

#: Every layer that normalises by statistics of the batch, and keeps running ones.
_NORMS = torch.nn.modules.batchnorm._BatchNorm


def _count_pass(body: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """A pass of `inputs[0]` (b, ...): backward too, if autograd records it. A forward pre-hook of bodies."""
    if not torch.compiler.is_compiling():  # else who calls the compiled body counts
        TALLY.counts[TRAINED if torch.is_grad_enabled() else FORWARD] += len(inputs[0])


def linear_to_fill(inputs: int, outputs: int) -> torch.nn.Linear:
    """A linear layer with any weights, on the CPU; no draw of theirs comes from everyone's generator."""
    # `skip_init` would draw nothing, and import half of torch's compiler for that, which takes a second.
    with warnings.catch_warnings(), seeded(0):
        # A task without a new class has a head without a row, which torch finds worth a warning.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return torch.nn.Linear(inputs, outputs)


def feature_start(inputs: int) -> Trainable:
    """What training on cached features (n, d) starts from: no body, `inputs` = d."""
    none = (0.0, 0.0, 0.0)
    return Trainable("features", torch.nn.Identity, inputs, 0, none, none, (), {})


class _Parts(NamedTuple):
    """What a network is made of, by name. To look for it takes as long as a small network's step.

    Attributes:
        own: those and the buffers, as in the state dict.
        state: those of the latter that are numbers, and not known to everyone from the start.
    """

    parameters: dict[str, torch.nn.Parameter]
    own: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    norms: dict[str, torch.nn.modules.batchnorm._BatchNorm]


class Network(torch.nn.Module):
    """Images (b, 3, size, size) to logits: `body` gives features (b, d), `heads[t]` scores classes of task t.

    Of a body that is the identity (`feature_start`), features (b, d) to logits.

    One linear layer per task, so that the classes of old tasks can be frozen, or competed with, apart.
    """

    _here: torch.Tensor

    def __init__(self, start: Trainable) -> None:
        super().__init__()
        self.dimension = start.dimension
        self.stages = start.stages
        self._size = start.size
        self._compiled = start.compiled
        self._called: set[str] | None = None
        self._found: _Parts | None = None
        #: The mode of all modules but of norms; None: who knows.
        self._mode: bool | None = None
        body = start.build()
        # Bodies that are put in its place have it inside.
        body.register_forward_pre_hook(_count_pass)
        self.put_body(body)
        # Says where the network is, even of a body without parameters; no part of its state.
        self.register_buffer("_here", torch.empty(0), persistent=False)
        self.heads = torch.nn.ModuleList()

    def put_body(self, body: torch.nn.Module) -> None:
        """Take `body`, such as the first one with prompts in it; what of it requires no gradient never trains."""
        if self._compiled:
            from fcl_bench.backbones.network_extractor import compile_body

            compile_body(body, _count_pass)
        self.body = body
        self._found = self._mode = None
        #: Parameters that stay as everyone has them from the start.
        self.never_trains = {name for name, value in self.named_parameters() if not value.requires_grad}

    @property
    def device(self) -> torch.device:
        return self._here.device

    @property
    def normalises_batches(self) -> bool:
        """Whether training mode takes the statistics of the batch, so that it needs more than one sample."""
        return bool(self._parts.norms)

    @property
    def _parts(self) -> _Parts:
        """Looked for again after each change of what the network is made of."""
        if self._found is None:
            norms = {name: module for name, module in self.named_modules() if isinstance(module, _NORMS)}
            own, known = self.state_dict(keep_vars=True), self.never_trains
            # The running statistics of a norm are known with its weight.
            beside = tuple(name.removesuffix("weight") + "running_" for name in known if name.endswith(".weight"))
            state = {
                name: value
                for name, value in own.items()
                if value.is_floating_point() and name not in known and not name.startswith(beside)
            }
            self._found = _Parts(dict(self.named_parameters()), own, state, norms)
        return self._found

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Network:
        """Do as any module does: on the way to another device buffers become other tensors."""
        self._found = None
        return super()._apply(fn, recurse)

    def grow(self, sizes: list[int], seed: int) -> None:
        """Add heads until there is one of each of `sizes`."""
        for task in range(len(self.heads), len(sizes)):
            self.heads.append(self.new_head(sizes[task], seed + task).to(self.device))
        self._found = self._mode = None

    def keep_heads(self, count: int) -> None:
        """Forget the heads behind the first `count`."""
        self.heads = self.heads[:count]
        self._found = self._mode = None

    def new_head(self, classes: int, seed: int) -> torch.nn.Module:
        """Features (n, d) to scores (n, classes), on the CPU: weights are uniform in +-1/sqrt(d), biases 0."""
        head = linear_to_fill(self.dimension, classes)
        with torch.no_grad():
            drawn = torch.rand(head.weight.shape, generator=torch.Generator().manual_seed(seed))
            head.weight.copy_((2 * drawn - 1) / self.dimension**0.5)
            head.bias.zero_()
        return head

    def classifier(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(L, d) weights and (L,) biases: linear scores of features whose largest is that of the logits."""
        state, heads = self.heads.state_dict(), range(len(self.heads))
        weight, bias = (torch.cat([state[f"{head}.{kind}"] for head in heads]) for kind in ("weight", "bias"))
        return weight, bias

    def load_classifier(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Take over what `classifier` returned of a network with the same heads."""
        first = 0
        for number, head in enumerate(self.heads):
            rows = slice(first, first + len(head.weight))  # type: ignore[arg-type]
            own = {"weight": weight[rows], "bias": bias[rows]}
            # Of prototypes the bias follows from the weights.
            self.load({f"heads.{number}.{kind}": own[kind] for kind, _ in head.named_parameters()})
            first = rows.stop

    def called_layers(self) -> list[tuple[str, torch.nn.Module]]:
        """The convolutions and linear layers of the body that a forward pass calls, with their names."""
        layers = [(n, m) for n, m in self.body.named_modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
        if self._called is None:
            called: set[str] = set()
            hooks = [m.register_forward_hook(lambda *_, name=n: called.add(name)) for n, m in layers]
            training = self.body.training
            with torch.inference_mode(), uncounted():
                self.body.eval()(torch.zeros(1, 3, self._size, self._size, device=self._here.device))
            self._mode = None
            self.train(training)
            for hook in hooks:
                hook.remove()
            self._called = called
        return [(name, module) for name, module in layers if name in self._called]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The outputs of all heads (b, L), head by head."""
        return self.logits(self.body(images))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """The outputs of all heads (b, L) of features (b, d)."""
        if len(self.heads) == 1:
            return self.heads[0](features)
        return torch.cat([head(features) for head in self.heads], dim=1)

    def freeze(self, names: Iterable[str]) -> None:
        """Let exactly these parameters stay as they are, besides those that never train.

        A batch norm without a parameter to train keeps its running statistics too.
        """
        frozen = self.never_trains | set(names)
        for name, parameter in self._parts.parameters.items():
            parameter.requires_grad_(name not in frozen)
            if name in frozen:
                parameter.grad = None  # of the last task that trained it

    def train(self, mode: bool = True) -> Network:
        """Switch the mode as any module does, but frozen batch norms stay in evaluation mode."""
        if self._mode is not mode:
            super().train(mode)
            self._mode = mode
        for norm in self._parts.norms.values():
            weight, bias = norm.weight, norm.bias
            trains = weight is not None and (weight.requires_grad or bias.requires_grad)
            # A module's attribute takes long to set, and rarely changes.
            if norm.training is not (mode and trains):
                norm.training = mode and trains
        return self

    def training_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that train, by name."""
        return {name: own for name, own in self._parts.parameters.items() if own.requires_grad}

    def changing(self) -> dict[str, torch.Tensor]:
        """What training changes: the parameters that train, and the running statistics of their batch norms."""
        parts = self._parts
        found: dict[str, torch.Tensor] = {}
        for name, parameter in parts.parameters.items():
            if parameter.requires_grad:
                found[name] = parameter.data
        for norm in parts.norms:
            for statistic in (f"{norm}.running_mean", f"{norm}.running_var"):
                if f"{norm}.weight" in found and statistic in parts.own:
                    found[statistic] = parts.own[statistic]
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """All parameters and running statistics but those that everyone has from the start, by name."""
        return {name: value.detach() for name, value in self._parts.state.items()}

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy `values` into the parameters and buffers of those names."""
        if values:
            own = self._parts.own
            torch._foreach_copy_([own[name] for name in values], list(values.values()))

    def load_known(self, values: Mapping[str, torch.Tensor]) -> None:
        """The same of those of `values` whose names are the network's own."""
        own = self._parts.own
        self.load({name: value for name, value in values.items() if name in own})


@dataclass(frozen=True)
class Heads:
    """The heads so far: one per task, for the classes that are new in it, or, as FedProTIP has it, for all it has.

    A logit is an output of any head; logits are numbered head by head. Where every class has one logit and no task
    has an old class, logits are columns, and all of this is trivial.

    Attributes:
        columns: per head, the columns of its classes, ascending.
        task: the columns of the classes of the task at hand, ascending; its head is the last.
    """

    columns: tuple[tuple[int, ...], ...]
    task: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Classes of each head."""
        return [len(columns) for columns in self.columns]

    @property
    def logits(self) -> list[int]:
        """The column of each logit."""
        return [column for columns in self.columns for column in columns]

    @property
    def plain(self) -> bool:
        """Whether logits are columns."""
        return self.logits == list(range(len(self.logits)))

    @property
    def reused(self) -> frozenset[int]:
        """Earlier heads that score classes of the task at hand, which its own head does not."""
        back = set(self.task) - set(self.columns[-1])
        return frozenset(head for head, columns in enumerate(self.columns[:-1]) if back & set(columns))

    @property
    def frozen_rows(self) -> dict[str, list[int]]:
        """By parameter of a reused head, the rows whose classes are not in the task at hand."""
        return {
            f"heads.{head}.{kind}": [row for row, column in enumerate(self.columns[head]) if column not in self.task]
            for head in self.reused
            for kind in ("weight", "bias")
        }

    @lru_cache(maxsize=64)  # noqa: B019 - the same for all clients and rounds of a task
    def competition(
        self, over: str, task: Sequence[int] | None = None, head: int = -1
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which logits compete in the loss on a task's samples, and where each class is among them.

        Args:
            over: "task", the logits of the task's classes; "seen", besides them all logits of other classes. A class
                never competes with itself under another head.
            task: the task's columns; None: of the task at hand.

        Returns:
            (c,) the logits, and (C,) the position of each column's logit in it, -1 for none; None and None where all
            logits compete and are columns.
        """
        task = self.task if task is None else task
        head %= len(self.columns)
        own = self._own(task, head)
        if over == "seen" and self.plain:
            return None, None
        rivals = range(len(self.logits)) if over == "seen" else range(0)
        chosen = sorted({*own, *(logit for logit in rivals if self.logits[logit] not in task)})
        position = torch.full((max(self.logits) + 1,), -1)
        for place, logit in enumerate(chosen):
            position[self.logits[logit]] = place
        return torch.tensor(chosen), position

    def _own(self, task: Sequence[int], head: int) -> list[int]:
        """The logit of each class of a task: its own head's, or that of the head which had the class first."""
        found: dict[int, int] = {}
        for logit, column in enumerate(self.logits):
            found.setdefault(column, logit)
        begin = sum(self.sizes[:head])
        found |= {column: begin + row for row, column in enumerate(self.columns[head])}
        return [found[column] for column in task]

    def class_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """(n, C) of logits (n, L): of a class with several heads the largest."""
        if self.plain:
            return logits
        columns = torch.tensor(self.logits, device=logits.device)
        scores = logits.new_full((len(logits), int(columns.max()) + 1), -torch.inf)
        return scores.scatter_reduce(1, columns.expand(len(logits), -1), logits, "amax")

    def to_message(self) -> dict[str, torch.Tensor]:
        """`classes`, the heads' sizes; where these don't tell, `columns` of all heads and `task`, its columns."""
        message = {"classes": torch.tensor(self.sizes, dtype=torch.int32)}
        if not self.plain or self.task != self.columns[-1]:
            message["columns"] = torch.tensor(self.logits, dtype=torch.int32)
            message["task"] = torch.tensor(self.task, dtype=torch.int32)
        return message

    @staticmethod
    def from_message(message: Message) -> Heads:
        """What `to_message` sent."""
        sizes = message["classes"].tolist()
        columns = message["columns"] if "columns" in message else torch.arange(sum(sizes))
        found = [tuple(own.tolist()) for own in columns.split(sizes)]
        return Heads(tuple(found), tuple(message["task"].tolist()) if "task" in message else found[-1])
