"""The client half of the gradient methods: a round of local training, and what a method may change about it.

And what both halves have: a network in their hands, and the names under which parts of models travel.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fcl_bench.data.images.batches import Samples, Standardise
from fcl_bench.linalg.tensors import Flat, with_prefix
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client
from fcl_bench.randomness import derived_seed
from fcl_bench.tracking.console import Notices
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import Trainer, rows

if TYPE_CHECKING:
    from fcl_bench.methods.gradient.base import GradientMethod

#: The stage of the rounds in which models travel.
MODEL = "model"
#: The stage in which clients send the moments of their classes, for `ccvr=gaussian` (`ccvr.py`).
MOMENTS = "moments"


def head_seed(context: Context) -> int:
    """The seed of new class weights; both halves draw the same."""
    return derived_seed(context.seed, "heads") % 2**62


def final_prefix(task: int) -> str:
    """Prefix of the names of a task's last model in the stages after training."""
    return f"final.{task}."


def teacher_prefix(task: int) -> str:
    """Prefix of the names of the model with which a task ended, from which clients learn in the next."""
    return f"teacher.{task}."


class ModelHolder:
    """What both halves have: a network, and a trainer that runs it.

    Attributes:
        start: what training starts from.
        network: with the heads so far.
        trainer: runs it.
        prepared: the heads, and the further frozen names, for which `prepare` was called last.
    """

    def __init__(self, method: GradientMethod, context: Context) -> None:
        self.method = method
        self.context = context
        self.start = method.start(context)
        layout = torch.channels_last
        network = method.build_network(context)
        self.network: Network = network.to(context.device, memory_format=layout)  # type: ignore[call-overload]
        self.prepared: tuple[Heads, frozenset[str]] | None = None
        start = self.start
        standardise = Standardise(start.size, start.mean, start.std) if method.trains_network else rows
        self.trainer = Trainer(method.training, standardise, context.device, method.training_key)
        self._notices = Notices(logging.getLogger(type(self).__module__))

    @property
    def scale(self) -> Standardise:
        """Turns images into what the network sees; only of a method that trains on images."""
        standardise = self.trainer.standardise
        assert isinstance(standardise, Standardise)
        return standardise

    def prepare(self, heads: Heads, frozen: Collection[str] = ()) -> None:
        """Give the network its heads so far. Freeze `frozen` and whatever the last head's task does not train."""
        if len(self.network.heads) < len(heads.columns):
            self.method.grow(self.network, heads.sizes, head_seed(self.context))
        task = len(heads.columns) - 1
        self.network.freeze(self.method.frozen(self.network, task, heads.reused) | set(frozen))
        self.prepared = heads, frozenset(frozen)


class GradientClient(ModelHolder, Client):
    """Trains the broadcast model on its own samples. The network is overwritten in every turn."""

    #: A task and its teacher, the same for all clients.
    _teacher: tuple[int, Network] | None = None
    #: A task, a round, and by client the heads that `train_batched` trained for turns that are still to come.
    _batched: tuple[int, int, dict[int, torch.Tensor]] = (-1, -1, {})

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """The parts of the model that training changed, and the number of samples; or the answer of another stage."""
        self.take_over(client_data, broadcast)
        if broadcast.stage == MOMENTS:
            from fcl_bench.methods.gradient.ccvr import moments_message

            features = self.trainer.features(self.network, client_data.inputs).to(self.context.dtype)
            columns = Heads.from_message(broadcast).task
            dense = self.context.sums
            return moments_message(features, client_data.labels, columns, self.method.gaussian, dense), state
        if broadcast.stage != MODEL:
            return self.answer(client_data, broadcast, state)
        task, round_, ahead = self._batched
        # Copies: the network is the next client's before a transport has to pass this on.
        trained: Mapping[str, torch.Tensor]
        if (task, round_) == (broadcast.task, broadcast.round) and client_data.client in ahead:
            heads = ahead.pop(client_data.client)
            self.network.load_classifier(heads[:, :-1], heads[:, -1])
            trained = Flat.of(self.network.changing())
        else:
            trained = self.trainer.train(
                self.network,
                self.samples(client_data, broadcast, state),
                float(broadcast["rate"]),
                self.batch_seed(client_data, broadcast),
                self.objective(client_data, broadcast, state),
            )
        new_state = self.remember(client_data, broadcast, state)
        samples = self.speaks_for(client_data, new_state)
        if self.context.sums and self.method.training.weighting == "samples":
            # In a secure sum models come multiplied by their weights.
            trained = {name: value.double() * samples for name, value in trained.items()}
        if beside := self.beside(client_data, broadcast, state, new_state):
            trained = {**trained, **beside}
        return Message(trained, samples=samples), new_state

    def train_batched(self, shards: Sequence[ClientData], broadcast: Message, states: Sequence[State]) -> str | None:
        """See `Client`: linear heads on features train side by side."""
        if broadcast.stage != MODEL:
            return None
        own, here = type(self), GradientClient
        as_here = ("update", "take_over", "beside", "pseudo_labels")
        if any(getattr(own, name) is not getattr(here, name) for name in as_here):
            return f"clients of method={self.method.name} do more than train"
        from fcl_bench.methods.gradient.batched_heads import train_batched_clients

        found = train_batched_clients(self, shards, broadcast, states)
        if isinstance(found, str):
            return found
        self._batched = broadcast.task, broadcast.round, found
        return ""

    def batch_seed(self, client_data: ClientData, broadcast: Message) -> int:
        """The seed of a client's batches in a round."""
        return derived_seed(
            self.context.seed, "training", client_data.task, int(broadcast["round"]), client_data.client
        )

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """The upload of a stage that is no training, under the broadcast model; only for methods with such stages."""
        return Message({}), state

    def samples(self, client_data: ClientData, broadcast: Message, state: State) -> Samples:
        """What this round trains on: the shard's labelled samples, and what a method adds."""
        # The network takes features in float32: to turn them all at once is cheaper than batch by batch.
        inputs = client_data.inputs if self.method.trains == "images" else rows(client_data.inputs)
        return Samples(inputs, client_data.labels)

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        """What this round minimises."""
        return Objective(Heads.from_message(broadcast), self.method.loss_classes, self.method.frozen_heads)

    def remember(self, client_data: ClientData, broadcast: Message, state: State) -> State:
        """What the client keeps after a round of the model, which `network` holds as it was trained."""
        return state

    def beside(self, client_data: ClientData, broadcast: Message, state: State, new: State) -> dict[str, torch.Tensor]:
        """What is sent beside the model that `network` holds as it was trained; `new` is what the client keeps."""
        return {}

    def speaks_for(self, client_data: ClientData, state: State) -> int:
        """The number of samples that a trained model is of, as the server weighs it; `state` is the new one."""
        return len(client_data.labels)

    def take_over(self, client_data: ClientData, broadcast: Message) -> None:
        """Bring the network to the broadcast model."""
        heads = Heads.from_message(broadcast)
        if self.prepared != (heads, frozenset()):
            self.prepare(heads)
        if broadcast.stage == MODEL:
            self.network.load_known(broadcast)
        else:
            prefix = final_prefix(client_data.task)
            self.network.load_known({name.removeprefix(prefix): value for name, value in broadcast.items()})

    def teacher(self, client_data: ClientData, broadcast: Message) -> Network | None:
        """The model with which the last task ended, frozen, with the heads that it had; None in the first task."""
        values = with_prefix(broadcast, teacher_prefix(client_data.task - 1))
        if not values:
            return None
        if self._teacher is None or self._teacher[0] != client_data.task:
            self._teacher = client_data.task, self.frozen_copy(values)
        return self._teacher[1]

    def frozen_copy(self, values: Mapping[str, torch.Tensor] | None = None) -> Network:
        """A copy of the network that does not train, in evaluation mode: of the broadcast model, or of an earlier one.

        Args:
            values: of the earlier model, by the names of `Network.state`; the copy has only its heads.
        """
        network = copy.deepcopy(self.network)
        if values is not None:
            heads = {name.split(".")[1] for name in values if name.startswith("heads.")}
            network.keep_heads(len(heads))
            network.load(dict(values))
        return network.eval().requires_grad_(False)
