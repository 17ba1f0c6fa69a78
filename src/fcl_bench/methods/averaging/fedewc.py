"""FedEWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017), federated.

In every task but the first, clients minimise

    cross-entropy + strength / 2 sum_i F_i (theta_i - theta*_i)^2,

theta* the model with which the last task ended and F the diagonal of the Fisher information of all tasks before. After
a task each client sends the sum over its samples of squared gradients, S_k = sum_x (d log p(y|x) / d theta)^2 under the
final model, and the server makes F_t = sum_k S_k / sum_k n_k, F <- min(gamma F + F_t / max F_t, fisher_max) of them
(without the division if normalise=none).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fcl_bench.config import knob
from fcl_bench.environment import exact_kernels
from fcl_bench.linalg.tensors import add_weighted, with_prefix
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import MODEL, GradientClient, final_prefix
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol import compute
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import MOMENTS, SUM, Schema, real
from fcl_bench.protocol.message import Message
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import forward_batch

#: How many bytes and samples of single-sample gradients are held at once.
HELD_BYTES = {"cuda": 2**31, "cpu": 2**28}
HELD_SAMPLES = {"cuda": 128, "cpu": 32}


def summed_squares(
    network: Network,
    names: list[str],
    samples: torch.Tensor,
    labels: torch.Tensor,
    *,
    competing: torch.Tensor | None,
    standardise: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """S = sum_x (d log p(y|x) / d theta)^2 of each parameter in `names`, in float64; evaluation mode, float32.

    Each gradient is of one sample; at most `HELD_BYTES` of them are held at once. If only heads are requested,
    no gradient is made: those of a linear layer are outer products, so S = (g^2)' (z^2).

    Args:
        names: of parameters.
        samples: (n, ...) as clients hold them.
        labels: (n,) each sample's class, as a position among the `competing` logits.
        competing: (c,) the logits of which p is the softmax; None: all.
        standardise: samples -> what the network sees.
    """
    own = dict(network.named_parameters())
    sums = {name: torch.zeros_like(own[name], dtype=torch.float64) for name in names}
    if all(name.startswith("heads.") for name in names):
        squares, size = _of_heads, forward_batch(samples.device)
    else:
        squares, size = _of_network, chunk_size([own[name] for name in names], samples.device)
    chosen = slice(None) if competing is None else competing.to(samples.device)
    network.eval()
    compute.count(trained=len(samples))
    # The fused attention kernels know no batches of gradients.
    with torch.no_grad(), exact_kernels(), compute.uncounted(), sdpa_kernel(SDPBackend.MATH):
        for batch, classes in zip(samples.split(size), labels.split(size), strict=True):
            for name, value in squares(network, names, chosen, standardise(batch).contiguous(), classes).items():
                sums[name].add_(value)
    return sums


def chunk_size(parameters: list[torch.nn.Parameter], device: torch.device) -> int:
    """How many samples' gradients are made at once."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    each = 4 * max(1, sum(parameter.numel() for parameter in parameters))
    return max(1, min(HELD_SAMPLES[kind], HELD_BYTES[kind] // each))


def _of_network(
    network: Network, names: list[str], competing: slice | torch.Tensor, seen: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Squares of a batch for any parameters: one gradient per sample, by torch's vectorised differentiation."""
    own = dict(network.named_parameters())
    parameters = {name: own[name].detach().contiguous() for name in names}

    def log_probability(parameters: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        scores = functional_call(network, parameters, (sample.unsqueeze(0),))[:, competing]
        return scores.log_softmax(dim=1).gather(1, label.reshape(1, 1)).sum()

    gradients = vmap(grad(log_probability), in_dims=(None, 0, 0))(parameters, seen, labels)
    return {name: value.square_().sum(dim=0) for name, value in gradients.items()}


def _of_heads(
    network: Network, names: list[str], competing: slice | torch.Tensor, seen: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Squares for heads alone, in float64: g = onehot(y) - p is the gradient in a sample's logits, z its features."""
    features = network.body(seen).double()
    squares = network.logits(features.float()).double()
    probabilities = squares[:, competing].softmax(dim=1)
    found = (torch.nn.functional.one_hot(labels, probabilities.shape[1]) - probabilities) ** 2
    squares.zero_()[:, competing] = found
    by_name: dict[str, torch.Tensor] = {}
    for head, part in enumerate(squares.split([head.out_features for head in network.heads], dim=1)):
        by_name[f"heads.{head}.weight"] = part.T @ features.square()
        by_name[f"heads.{head}.bias"] = part.sum(dim=0)
    return {name: by_name[name] for name in names}


log = logging.getLogger(__name__)

#: The stage in which clients send their sums of squared gradients.
FISHER = "fisher"


def fisher_prefix(task: int) -> str:
    """Prefix of the names of F as it was after a task."""
    return f"fisher.{task}."


class Anchored(Objective):
    """The gradient of the penalty, strength F (theta - theta*), is added to that of the loss; autograd never sees it.

    Args:
        pairs: per parameter, itself, F and theta*, all of its shape.
    """

    def __init__(
        self, heads: Heads, method: FedEWC, pairs: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._pairs, self._strength = pairs, method.strength

    def modify_gradients(self, network: Network) -> None:
        for weight, F, anchor in self._pairs:
            if weight.grad is not None:
                weight.grad.addcmul_(F, weight.data - anchor, value=self._strength)
        super().modify_gradients(network)


class FedEWCClient(GradientClient):
    """Trains with the penalty, and sends squared gradients after the task."""

    method: FedEWC

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        fisher = with_prefix(broadcast, fisher_prefix(client_data.task - 1))
        if not fisher:
            return super().objective(client_data, broadcast, state)
        own, anchors = dict(self.network.named_parameters()), with_prefix(broadcast, final_prefix(client_data.task - 1))
        pairs = [(own[name], F.to(own[name]), anchors[name].to(own[name])) for name, F in fisher.items()]
        return Anchored(Heads.from_message(broadcast), self.method, pairs)

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """S_k of each parameter, and the number of samples."""
        labels = client_data.labels
        competing, position = Heads.from_message(broadcast).competition(self.method.loss_classes)
        squares = summed_squares(
            self.network,
            self.method.measured(self.network),
            client_data.inputs,
            labels if position is None else position.to(labels.device)[labels],
            competing=competing,
            standardise=self.trainer.standardise,
        )
        return Message(squares, samples=len(labels)), state


class FedEWCServer(GradientServer):
    """Keeps F and theta*.

    Attributes:
        fisher: F by parameter, in float32.
        anchor: theta* of the same parameters.
    """

    method: FedEWC
    counted = (MODEL, FISHER)
    state = ("fisher", "anchor")

    def __init__(self, method: FedEWC, context: Context) -> None:
        super().__init__(method, context)
        self.fisher: dict[str, torch.Tensor] = {}
        self.anchor: dict[str, torch.Tensor] = {}
        self._squares: Mapping[str, torch.Tensor] = {}
        self._samples = 0

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        """F and theta* of what trains. theta* has the names of the last stage, in which most clients received it."""
        extra = super().extra_broadcast()
        if self.stage == MODEL:
            trains = [name for name in self.network.changing() if name in self.fisher]
            extra |= {fisher_prefix(self.task - 1) + name: self.fisher[name] for name in trains}
            extra |= {final_prefix(self.task - 1) + name: self.anchor[name] for name in trains}
        return extra

    def matching(self, name: str) -> Mapping[str, torch.Tensor]:
        if self.stage != FISHER:
            return super().matching(name)
        own = dict(self.network.named_parameters())
        return {name: own[name] for name in self.method.measured(self.network)}

    def absorb_answer(self, client: int, upload: Message) -> None:
        self._squares = add_weighted(self._squares, upload.tensors, 1.0)
        self._samples += upload.samples or 0

    def finish_stage(self) -> None:
        gamma, most = self.method.gamma, self.method.fisher_max
        if self._samples:
            total = {name: gamma * F.double() for name, F in self.fisher.items()}
            largest = max((float(squares.max()) for squares in self._squares.values() if squares.numel()), default=0.0)
            unit = largest if self.method.normalise == "maximum" and largest > 0 else self._samples
            for name, squares in self._squares.items():
                new = squares / unit
                total[name] = total[name] + new if name in total else new
            self.fisher = {name: (F if most is None else F.clamp(max=most)).float() for name, F in total.items()}
        self._squares, self._samples = {}, 0
        state = self.network.state()
        self.anchor = {name: state[name].clone() for name in self.fisher}
        self._warn_of_long_steps()

    def _warn_of_long_steps(self) -> None:
        """Warn if steps overshoot: on a parabola they do if step size times curvature is above 2 (1 + momentum)."""
        training, strength = self.method.training, self.method.strength
        reached, bound = training.lr * strength * self._largest(), 2 * (1 + training.momentum)
        if training.optimizer == "sgd" and reached > bound:
            self._notices.tell(
                "steps",
                f"fedewc: lr times strength times F is up to {reached:.3g} after task {self.task}; above {bound:g} the"
                " penalty makes steps overshoot (a smaller method.strength, method.fisher_max or method.training.lr)",
            )

    def gates(self) -> dict[str, str]:
        fisher = self.report().get("fisher")
        if fisher is None or not self.method.strength:
            return {}
        if not fisher["largest"]:
            return {"idle_term": "F is zero: nothing holds old tasks"}
        share = fisher["at_maximum"]
        clipped = f"{100 * share:.1f} % of F's entries are at method.fisher_max: the penalty tells few weights apart"
        return {"idle_term": clipped} if share > 0.5 else {}

    def _largest(self) -> float:
        return max((float(F.max()) for F in self.fisher.values() if F.numel()), default=0.0)

    def report(self) -> dict[str, Any]:
        """`fisher`: mean and largest entry of F at the end, and which share of it is at `fisher_max`."""
        if not self.fisher:
            return {}
        together = torch.cat([F.flatten() for F in self.fisher.values()]).double()
        most = self.method.fisher_max
        # As float32 has it.
        clipped = 0.0 if most is None else float((together >= torch.tensor(most).double().item()).double().mean())
        return {"fisher": {"mean": float(together.mean()), "largest": self._largest(), "at_maximum": clipped}}


@dataclass
class FedEWC(GradientMethod):
    name: ClassVar[str] = "fedewc"
    revision: ClassVar[int] = 2  # 1 had no normalise
    search: ClassVar[Mapping[str, str]] = {"strength": "log(1,300)"}
    client_half = FedEWCClient
    server_half = FedEWCServer

    strength: float = knob(10.0, least=0)
    gamma: float = knob(1.0, least=0, most=1)
    normalise: str = knob("maximum", choices=("maximum", "none"))
    fisher_max: float | None = knob(None, above=0)
    variant: str = knob("working", choices=("working", "published"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "published":
            unused = ("strength", "gamma", "normalise", "fisher_max")
            defaults = {knob.name: knob.default for knob in dataclasses.fields(self) if knob.name in unused}
            self.require_published(**defaults, loss_classes="task", weighting="uniform")

    @property
    def penalises(self) -> bool:
        return self.variant == "working" and self.strength > 0

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        if self.variant == "published":
            log.warning(
                "method.variant=published is fedavg: in the public code the penalty never reaches the model that"
                " trains (docs/methods/fedewc.md)"
            )

    def uploads(self, context: Context) -> dict[str, Schema]:
        squares = real(least=0, combine=SUM, leaks=MOMENTS)
        return {**super().uploads(context), **({FISHER: {"*": squares}} if self.penalises else {})}

    def stages(self, task: Task) -> list[str]:
        return [*super().stages(task), *([FISHER] if self.penalises else [])]

    def measured(self, network: Network) -> list[str]:
        """Names of the parameters that F is of: those that train now and may train again in a later task."""
        settled = self.frozen(network, 1, range(len(network.heads)))
        return [name for name, own in network.named_parameters() if own.requires_grad and name not in settled]
