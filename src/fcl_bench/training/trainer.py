"""Training on one client's samples, and features: what gradient methods and first-stage adaptation share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from fcl_bench.data.images.batches import Augment, Samples
from fcl_bench.environment import exact_attention, exact_kernels
from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import Flat, all_finite
from fcl_bench.randomness import seeded
from fcl_bench.training.knobs import SGD, Training, add_weight_decay, client_optimiser, diverged
from fcl_bench.training.network import Network
from fcl_bench.training.objective import Objective

if TYPE_CHECKING:
    from fcl_bench.training.linear_heads import LinearHeads

#: From standardised samples (b, ...), and what else is known of each, to features (b, d).
Features = Callable[..., torch.Tensor]
#: Images per forward pass where nothing is trained.
FORWARD_BATCH = {"cuda": 512, "cpu": 128}


def forward_batch(device: torch.device) -> int:
    """Images per forward pass on this device where nothing is trained."""
    return FORWARD_BATCH.get(device.type, FORWARD_BATCH["cpu"])


class Trainer:
    """Runs a network on samples that are on its device: training, features, scores.

    Args:
        standardise: samples as clients hold them -> what the network sees (`Standardise` of images, or `rows`).
    """

    def __init__(
        self,
        training: Training,
        standardise: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        key: str = "method.training",
    ) -> None:
        self.training = training
        self.standardise = standardise
        self.augment = Augment(training.augment)
        self._device = device
        self._key = key
        self._half = training.forward_precision(device.type, standardise is not rows) == "bfloat16"

    def train(self, network: Network, samples: Samples, rate: float, seed: int, objective: Objective) -> Flat:
        """One client's round: `training.epochs` passes over its samples, in place.

        Args:
            seed: of the order of the samples, of augmentation, and of draws inside the network.

        Returns:
            Copies of what training changed (see `Network.changing`).

        Raises:
            UserError: the loss, or the model, is not finite.
        """
        knobs = self.training
        generator = torch.Generator().manual_seed(seed)
        optimiser = client_optimiser(network, knobs, rate)
        linear: LinearHeads | None = None
        if type(network.body) is torch.nn.Identity and not self._half:
            from fcl_bench.training.linear_heads import LinearHeads, repeats_one_batch, train_repeatedly

            linear = LinearHeads(network, objective) if LinearHeads.fits(network, objective) else None
        if linear is None:
            # Batch norm has no statistics of a single image; its running ones serve.
            network.train(len(samples) > 1 or not network.normalises_batches)
        one_batch = 0 < len(samples) <= knobs.batch_size and knobs.epochs > 1
        with self.reproducible(seed), linear.few_threads(knobs.batch_size) if linear else nullcontext():
            if linear and one_batch and repeats_one_batch(linear, objective, samples, optimiser):
                batch = self.standardise(samples.inputs)
                loss = train_repeatedly(
                    linear, objective, batch, samples.labels, knobs, optimiser.param_groups[0]["lr"]
                )
            else:
                loss = self._stepwise(network, samples, generator, optimiser, objective, linear)
        objective.finish(network)
        trained = Flat.of(network.changing())
        if not all_finite(loss, trained.buffer):
            raise self.diverged()
        return trained

    def _stepwise(
        self,
        network: Network,
        samples: Samples,
        generator: torch.Generator,
        optimiser: SGD | torch.optim.Optimizer,
        objective: Objective,
        linear: LinearHeads | None,
    ) -> torch.Tensor:
        """A step for every batch of every epoch; returns the last loss, 0 without a batch."""
        knobs, loss = self.training, torch.zeros((), device=self._device)
        weights = list(network.training_parameters().values())
        decay = knobs.weight_decay
        held: list[tuple[torch.nn.Parameter, list[int], torch.Tensor]] = []
        if knobs.optimizer == "adamw":  # it decays weights by itself, whatever their gradients are
            decay = 0.0
            held = [(own, rows, own.detach()[rows].clone()) for own, rows in objective.partly_frozen(network)]
        for _ in range(knobs.epochs):
            for inputs, labels in samples.batches(knobs.batch_size, self.augment, generator):
                batch = self.standardise(inputs)
                optimiser.zero_grad(set_to_none=True)
                if linear is not None:
                    linear.backward(batch, labels)
                else:
                    with self.autocast():
                        loss = objective.loss(network, batch, labels)
                    loss.backward()
                    loss = loss.detach()
                add_weight_decay(weights, decay)
                objective.modify_gradients(network)
                optimiser.step()
                for parameter, rows, values in held:
                    parameter.data[rows] = values
        return loss if linear is None else linear.loss()

    @torch.inference_mode()
    def features(
        self, network: Network, images: torch.Tensor, *beside: torch.Tensor, of: Features | None = None
    ) -> torch.Tensor:
        """Features (n, d) of samples (n, ...) in float32, in evaluation mode.

        Args:
            beside: (n, ...) what is known of each sample, as further arguments of `of`.
            of: from standardised samples to features; None: the network's body.
        """
        network.eval()
        size, of = forward_batch(self._device), of or network.body
        batches = zip(*(values.split(size) for values in (images, *beside)), strict=True)
        with exact_kernels(), self.autocast():
            return torch.cat([of(self.standardise(batch), *known).float() for batch, *known in batches])

    def diverged(self) -> UserError:
        """What to tell when a model is no longer finite."""
        return diverged(self._key, self.training.lr, self.training.weight_decay)

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of forward passes."""
        return torch.autocast(self._device.type, torch.bfloat16) if self._half else nullcontext()

    @contextmanager
    def reproducible(self, seed: int) -> Iterator[None]:
        """Draws inside the network (dropout) follow from the seed; nobody else's are changed."""
        if self._device.type != "cuda":
            # `torch.manual_seed` would prepare to seed GPUs that are not in use, which takes 0.1 ms in every turn.
            with seeded(seed):
                yield
            return
        with torch.random.fork_rng([self._device]), exact_kernels(), exact_attention(self._device):
            torch.manual_seed(seed)
            yield


def rows(features: torch.Tensor) -> torch.Tensor:
    """Features (b, d) as a network takes them: in float32."""
    return features.float()
