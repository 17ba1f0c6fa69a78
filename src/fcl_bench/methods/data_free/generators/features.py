"""A generator that turns a class and noise into a feature (FedGen; Zhu, Hong, Zhou, ICML 2021)."""

from __future__ import annotations

import torch

from fcl_bench.training.network import linear_to_fill


class FeatureGenerator(torch.nn.Module):
    """G(y, eps): Linear(C + N, h) of [one-hot y, eps], batch norm, ReLU, Linear(h, d).

    The first layer is kept in two parts: `classes` (C, h), whose rows are added as classes are, and `noise` (h, N + 1).
    New weights are uniform within 1/sqrt(fan-in); of the first layer the N inputs of noise count, since batch norm
    takes the scale out again.

    Args:
        hidden: h.
        noise: N.
        seed: of the initial weights.
    """

    def __init__(self, dimension: int, hidden: int, noise: int, seed: int) -> None:
        super().__init__()
        self.inputs = noise
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.nn.Parameter(torch.empty(0, hidden))
        self.noise = linear_to_fill(noise, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.out = linear_to_fill(hidden, dimension)
        with torch.no_grad():
            for layer in (self.noise, self.out):
                for parameter in layer.parameters():
                    parameter.copy_(_uniform(parameter.shape, layer.in_features, generator))

    def grow(self, classes: int) -> None:
        """Add rows until there are `classes`; the old ones stay."""
        known, hidden = self.classes.shape
        if classes > known:
            generator = torch.Generator().manual_seed(self._seed + known + 1)
            rows = _uniform(torch.Size((classes - known, hidden)), self.inputs, generator).to(self.classes.device)
            self.classes = torch.nn.Parameter(torch.cat([self.classes.data, rows]))

    def forward(self, labels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Features (b, d) of the columns `labels` (b,) and `noise` (b, N)."""
        # A product instead of a look-up: its gradient is the same at every run on a GPU too.
        which = torch.nn.functional.one_hot(labels, len(self.classes)).to(noise.dtype)
        return self.out(self.norm(which @ self.classes + self.noise(noise)).relu())

    def draw(self, labels: torch.Tensor, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (b, d) of `labels`, and the standard normal noise (b, N) of which they were made.

        Args:
            labels: (b,) columns.
            generator: on the CPU; None: torch's own.
        """
        noise = torch.randn((len(labels), self.inputs), generator=generator).to(self.classes)
        return self(labels, noise), noise

    def state(self) -> dict[str, torch.Tensor]:
        """All weights and running statistics: 4 (h (C + N + 1) + 4 h + d (h + 1)) bytes."""
        return {name: value for name, value in self.state_dict().items() if value.is_floating_point()}

    def load(self, values: dict[str, torch.Tensor]) -> None:
        """Take over what `state` returned, rows for new classes included."""
        self.grow(len(values["classes"]))
        self.load_state_dict(values, strict=False)


def _uniform(shape: torch.Size, inputs: int, generator: torch.Generator) -> torch.Tensor:
    return (2 * torch.rand(shape, generator=generator) - 1) / inputs**0.5


def similarity(noise: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """L_div = exp(-mean_ij |eps_i - eps_j|^2 |G_i - G_j|_1), both norms as means over entries; in (0, 1].

    It is 1 if every pair has equal noise or equal outputs, and small if different noise gives different outputs.

    Args:
        noise: (b, N).
        outputs: (b, d).
    """
    noise_apart = (noise[:, None] - noise[None]).square().mean(dim=2)
    outputs_apart = (outputs[:, None] - outputs[None]).abs().mean(dim=2)
    return torch.exp(-(noise_apart * outputs_apart).mean())


class KeptAdam:
    """Adam whose moments outlive a round, by the names of the parameters, which may gain rows in between."""

    def __init__(self) -> None:
        self._moments: dict[str, torch.Tensor] = {}

    def begin(self, module: torch.nn.Module, rate: float, weight_decay: float) -> torch.optim.Adam:
        """An optimiser of the module's parameters that goes on from the moments; zero for new rows."""
        optimiser = torch.optim.Adam(module.parameters(), lr=rate, weight_decay=weight_decay)
        for name, parameter in module.named_parameters():
            if f"{name}.step" in self._moments:
                state = {key: self._moments[f"{name}.{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")}
                for key in ("exp_avg", "exp_avg_sq"):
                    new = parameter.new_zeros(len(parameter) - len(state[key]), *parameter.shape[1:])
                    state[key] = torch.cat([state[key], new])
                optimiser.state[parameter] = state
        return optimiser

    def keep(self, module: torch.nn.Module, optimiser: torch.optim.Adam) -> None:
        """Take over an optimiser's moments."""
        for name, parameter in module.named_parameters():
            for key, value in optimiser.state[parameter].items():
                self._moments[f"{name}.{key}"] = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`<parameter>.exp_avg`, `.exp_avg_sq`, `.step`."""
        return dict(self._moments)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        # Adam has its number of steps on the CPU.
        self._moments = {name: value.cpu() if name.endswith(".step") else value for name, value in state.items()}
