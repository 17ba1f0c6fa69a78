"""GLFC (Dong et al., CVPR 2022): clients notice new classes, keep exemplars of old ones, and even out forgetting.

A client has a signal when new classes come: in its first round of a task (`signal: boundary`), or where the mean
entropy of the model's predictions on its samples has risen (`entropy`):

    H = mean_x sum_c -p_c log(p_c + 1e-5),   signal = H - H before > rise.

Its classes of the last task then count as learnt, and it keeps exemplars of them by herding. It trains on its samples
and all exemplars with the loss below, in which an old model answers for the old columns: with
`proxy: reconstruct` the best of the last task, which the server picks by images that it reconstructs from gradients
(`exemplars.proxy`); with `none` the model with which the last task ended.

q are a sample's logits, y its class, sigma the logistic function. The gradient in its own logit has the magnitude
g = |sigma(q)[y] - 1|, which is divided by its mean over the sample's group in the batch: the samples of classes that
the client learnt in earlier tasks, or the others. O are the old model's columns and q' its logits.

    w_i   = g_i / mean of g over i's group; 1 where the client has learnt no class yet
    L_cur = mean_{i,c} w_i BCE(sigma(q_ic), [c = y_i])
    L_old = mean_{i,c} BCE(sigma(q_ic), t_ic),   t_ic = sigma(q'_ic) for c in O, else [c = y_i]
    L     = (L_cur + L_old) / 2, or L_cur where there is no old model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Samples
from fcl_bench.errors import UserError
from fcl_bench.linalg.gram import class_sums
from fcl_bench.methods.exemplars.memory import (
    EXEMPLARS,
    ExemplarMethod,
    ExemplarServer,
    memory_size,
    recalled,
    with_memory,
)
from fcl_bench.methods.exemplars.proxy import GRADIENTS, Inversion, PrototypeClient, ProxyServer
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import Schema, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: Added inside the logarithm of the entropy, as published.
_EPSILON = 1e-5


def magnitudes(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(b,) g of the logits (b, C) and labels (b,), without a gradient."""
    # 1 - sigma(q) = sigma(-q), which does not round to 0 where sigma(q) rounds to 1.
    return scores.detach().gather(1, labels.unsqueeze(1)).squeeze(1).neg().sigmoid()


def group_weights(magnitude: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """(b,) each magnitude divided by the mean over its group.

    Args:
        magnitude: (b,) g.
        old: (b,) bool, which of the two groups each sample is in.
    """
    group = old.long()
    sums, sizes = class_sums(torch.stack([magnitude, torch.ones_like(magnitude)], dim=1), group, 2)
    # A group with nothing left to learn has no mean to divide by.
    factor = torch.where(sums > 0, sizes / sums, 0)
    return magnitude * factor[group]


def entropy(scores: torch.Tensor) -> torch.Tensor:
    """() H = mean_x sum_c -p_c log(p_c + 1e-5), p the softmax of logits (n, C), in float64."""
    p = scores.double().softmax(dim=1)
    return -(p * (p + _EPSILON).log()).sum(dim=1).mean()


class Compensated(Objective):
    """The loss of the equations above; LGA changes `weights` and `combined`.

    Args:
        heads, rest: see `Objective`. All columns count.
        learnt: (C,) bool, the columns that the client learnt in earlier tasks.
        old: the old model; its logits are the first ones of the model that learns. None: there is none.
    """

    def __init__(self, heads: Heads, rest: bool, learnt: torch.Tensor, old: Network | None) -> None:
        super().__init__(heads, "seen", rest)
        self._learnt, self._old = (learnt if bool(learnt.any()) else None), old

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        targets = one_hot(labels, scores.shape[1]).to(scores.dtype)
        weights = self.weights(scores, labels)
        current = binary_cross_entropy_with_logits(scores, targets, reduction="none")
        weighted = current.mean() if weights is None else (weights.unsqueeze(1) * current).mean()
        if self._old is None:
            return weighted
        with torch.no_grad():
            wanted = self._old(inputs).to(scores.dtype).sigmoid()
        softened = targets.clone()
        softened[:, : wanted.shape[1]] = wanted
        distilled = binary_cross_entropy_with_logits(scores, softened, reduction="none")
        return self.combined(weighted, distilled, weights)

    def weights(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """(b,) w; None: all are 1."""
        return None if self._learnt is None else group_weights(magnitudes(scores, labels), self._learnt[labels])

    def combined(self, weighted: torch.Tensor, distilled: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """L of L_cur, the terms (b, C) of L_old, and w."""
        return (weighted + distilled.mean()) / 2


#: What a client keeps beside its exemplars: the task, whether it has a signal in the round at hand, and the last H.
_TASK, _SIGNAL, _ENTROPY = "task", "signal", "entropy"
#: Columns (c,) of the client's classes: of the task at hand, of the one before, and of those that count as learnt.
_CURRENT, _LAST, _LEARNT = "classes.current", "classes.last", "classes.learnt"
#: With `signal: entropy`, the samples of the task at hand and of the last, which wait for the signal.
_WAITING = ("inputs.", "labels.")


class GLFCClient(PrototypeClient):
    """Notices new classes, keeps exemplars, and trains on them beside its samples."""

    method: GLFC

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """The upload of any gradient method and, after a signal, gradients."""
        if broadcast.stage == MODEL:
            state = self.noticed(client_data, broadcast, state)
        elif broadcast.stage == EXEMPLARS:
            state = self.entered(client_data, state)
        upload, state = super().update(client_data, broadcast, state)
        if broadcast.stage != MODEL:
            return upload, state
        if self.method.reconstructs and bool(state[_SIGNAL]):
            columns = len(Heads.from_message(broadcast).logits)
            gradients, each = self.gradients(client_data, broadcast, columns)
            upload = replace(upload, tensors={**upload, GRADIENTS: gradients}, groups={GRADIENTS: each})
        return upload, state

    def speaks_for(self, client_data: ClientData, state: State) -> int:
        """The client's samples and exemplars together."""
        return super().speaks_for(client_data, state) + memory_size(state)

    # What it notices --------------------------------------------------------------------------------------------------

    def entered(self, client_data: ClientData, state: State) -> State:
        """The state in the shard's task. If the client is in it for the first time, its classes move on."""
        if self.knows(client_data, state):
            return state
        none = client_data.labels[:0]
        before, learnt = state.get(_CURRENT, none), state.get(_LEARNT, none)
        state = {**state, _TASK: torch.tensor(client_data.task), _CURRENT: client_data.labels.unique(), _LEARNT: learnt}
        if self.method.signal == "boundary":
            return {**state, _LEARNT: torch.cat([learnt, before]).unique()}
        state[_LAST] = before
        if self.method.memory:
            for kind, own in zip(_WAITING, (client_data.inputs, client_data.labels), strict=True):
                state[f"{kind}last"] = state.get(f"{kind}current", own[:0])
                state[f"{kind}current"] = own
        return state

    @staticmethod
    def knows(client_data: ClientData, state: State) -> bool:
        """Whether the client has been in the shard's task before."""
        return _TASK in state and int(state[_TASK]) == client_data.task

    def noticed(self, client_data: ClientData, broadcast: Message, state: State) -> State:
        """The state with the round's signal and what follows from it for classes and memory."""
        first = not self.knows(client_data, state)
        state = self.entered(client_data, state)
        if self.method.signal == "boundary":
            return {**state, _SIGNAL: torch.tensor(first)}
        self.take_over(client_data, broadcast)
        with torch.inference_mode():
            found = float(entropy(self.network.logits(self.trainer.features(self.network, client_data.inputs))))
        signal = found - float(state.get(_ENTROPY, 0.0)) > self.method.rise
        state = {**state, _ENTROPY: torch.tensor(found, dtype=torch.float64), _SIGNAL: torch.tensor(signal)}
        return self.learnt(state) if signal and len(state[_LAST]) else state

    def learnt(self, state: State) -> State:
        """After a signal: the last task's classes are learnt, and exemplars of them are chosen by the model at hand."""
        last, learnt = state[_LAST], torch.cat([state[_LEARNT], state[_LAST]]).unique()
        state = {**state, _LEARNT: learnt, _LAST: last[:0]}
        if not self.method.memory:
            return state
        inputs, labels = (state.pop(f"{kind}last") for kind in _WAITING)
        return self.with_exemplars(state, inputs, labels)

    # What it keeps ----------------------------------------------------------------------------------------------------

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """At the end of a task: choose the exemplars of its classes."""
        return Message({}), self.with_exemplars(state, client_data.inputs, client_data.labels)

    # What it trains on ------------------------------------------------------------------------------------------------

    def samples(self, client_data: ClientData, broadcast: Message, state: State) -> Samples:
        return with_memory(super().samples(client_data, broadcast, state), recalled(state))

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        heads = Heads.from_message(broadcast)
        old = self.teacher(client_data, broadcast)
        return Compensated(heads, self.method.frozen_heads, self.learnt_columns(heads, state), old)

    def learnt_columns(self, heads: Heads, state: State) -> torch.Tensor:
        """(C,) bool, the columns of the classes that the client learnt in earlier tasks."""
        columns = state[_LEARNT]
        return torch.zeros(len(heads.logits), dtype=torch.bool, device=columns.device).index_fill_(0, columns, True)


@dataclass
class GLFC(ExemplarMethod):
    name: ClassVar[str] = "glfc"
    search: ClassVar[Mapping[str, str]] = {"loss_classes": "", "training.lr": "log(0.03,3)"}
    client_half = GLFCClient
    proxy_half: ClassVar[type[ProxyServer]] = ProxyServer
    keeps_teacher: ClassVar[bool] = True

    training: Training = field(default_factory=lambda: Training(lr=0.5))
    signal: str = knob("boundary", choices=("boundary", "entropy"))
    rise: float = knob(1.2, above=0, of="signal=entropy")
    proxy: str = knob("reconstruct", choices=("reconstruct", "none"))
    inversion: Inversion = field(default_factory=Inversion)  # without `of`: profile=quick sets it beside any proxy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reconstructs and not self.trains_network:
            raise UserError("method.trains=features: method.proxy=reconstruct makes images", "method.proxy=none")

    @property
    def reconstructs(self) -> bool:
        return self.proxy == "reconstruct"

    def server(self, context: Context) -> Server:
        return self.proxy_half(self, context) if self.reconstructs else ExemplarServer(self, context)

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = {**super().uploads(context), EXEMPLARS: {}}
        if self.reconstructs:
            gradients = real("p", "classes", optional=True, otherwise="method.proxy=none")
            stages[MODEL] = {**stages[MODEL], GRADIENTS: gradients}
        return stages

    def stages(self, task: Task) -> list[str]:
        """With `signal: boundary` exemplars are chosen at the end of a task, by the model that the next begins with."""
        chooses = self.memory and self.signal == "boundary"
        return [*super().stages(task), *([EXEMPLARS] if chooses else [])]
