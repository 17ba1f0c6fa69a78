"""How long a server makes synthetic images before a task, and how much of it is the networks' own work.

`make bench-generators` measures TARGET, LANDER and MFCL (every method of conf/method whose server synthesises) at the
knobs of profile=quick; overrides after `--` change them. One run measures both sides, alternating: the whole start of a
second task, in which the server makes its images or trains its generator; and the bare forward and backward passes of
the same networks, on ready inputs of the same sizes. Which passes these are is recorded once, from the server itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch.nn.modules import module as every_module
from training_throughput import images_of, network_of, synchronise

from fcl_bench import environment
from fcl_bench.backbones.trainable import Trainable
from fcl_bench.composition import config_dir
from fcl_bench.config import load_settings, target_class
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.methods.gradient.data_free import DataFreeMethod
from fcl_bench.protocol.problem import Problem
from fcl_bench.protocol.task import Task
from fcl_bench.protocol.wire import WireFormat

#: The share of a server's time that bare passes should take at least.
AIM = 0.85


@dataclass(frozen=True)
class Call:
    """A forward pass of a whole network, as it was seen.

    Attributes:
        network: what was called.
        inputs: shape and memory format of each input that is a float tensor; any other input itself.
        derived: of each input, whether a gradient is asked for.
        training: the network's mode.
        learns: whether a parameter of it requires a gradient.
        differentiated: whether autograd was on.
        half: whether autocast was on.
    """

    network: torch.nn.Module
    inputs: tuple[Any, ...]
    derived: tuple[bool, ...]
    training: bool
    learns: bool
    differentiated: bool
    half: bool


@dataclass
class Step:
    """The forward passes up to a backward pass, or, of the last step, up to the end."""

    calls: list[Call] = field(default_factory=list)
    backward: bool = False


@dataclass(frozen=True)
class Shape:
    """Of a float tensor that was an input."""

    sizes: tuple[int, ...]
    memory_format: torch.memory_format


def data_free_methods() -> list[str]:
    """The names in conf/method of all methods whose server synthesises."""
    found = []
    for file in sorted((config_dir() / "method").glob("*.yaml")):
        target = next(line for line in file.read_text().splitlines() if line.startswith("_target_:"))
        if issubclass(target_class("method", target.split()[1]), DataFreeMethod):
            found.append(file.stem)
    return found


def method_of(name: str, overrides: list[str]) -> DataFreeMethod:
    """The method at its knobs of profile=quick, but for the overrides."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        asked = [f"method={name}", "profile=quick", "data=digits", "backbone=tiny", *overrides]
        method = load_settings(compose("config", overrides=asked)).method
    assert isinstance(method, DataFreeMethod)
    return method


def maker(method: DataFreeMethod, start: Trainable, tasks: list[Task], device: torch.device) -> Callable[[], object]:
    """A server in front of its second task; the call starts that. The model is as it was initialised."""
    problem = Problem(start.dimension, 0, torch.float64, device, WireFormat(torch.float32), start)
    server = method.server(problem)
    server.start_task(tasks[0])
    return lambda: server.start_task(tasks[1])


@contextmanager
def recorded(device: torch.device) -> Iterator[list[Step]]:
    """The steps of whatever runs inside: every call of a network that is not a part of another's."""
    steps, depth = [Step()], 0

    def enter(network: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal depth
        depth += 1
        if depth > 1:
            return
        steps[-1].calls.append(
            Call(
                network,
                tuple(_shape(value) for value in inputs),
                tuple(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs),
                network.training,
                any(value.requires_grad for value in network.parameters()),
                torch.is_grad_enabled(),
                torch.is_autocast_enabled(device.type),
            )
        )

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    def ending(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            steps[-1].backward = True
            steps.append(Step())
            return function(*arguments, **options)

        return run

    hooks = [
        every_module.register_module_forward_pre_hook(enter),
        every_module.register_module_forward_hook(leave, always_call=True),
    ]
    backward, grad = torch.Tensor.backward, torch.autograd.grad
    torch.Tensor.backward, torch.autograd.grad = ending(backward), ending(grad)  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        torch.Tensor.backward, torch.autograd.grad = backward, grad  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def _shape(value: Any) -> Any:
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return Shape(tuple(value.shape), torch.channels_last if last else torch.contiguous_format)


def bare_pass(steps: list[Step], device: torch.device) -> Callable[[], float]:
    """Seconds of the passes of these steps, on ready inputs; an input that was made by a network is made so again."""
    ready: dict[tuple[Shape, bool], torch.Tensor] = {}
    modes: dict[torch.nn.Module, tuple[bool, bool]] = {}

    def given(shape: Any, derived: bool, made: dict[tuple[int, ...], torch.Tensor]) -> Any:
        if not isinstance(shape, Shape):
            return shape
        if derived and shape.sizes in made:
            return made.pop(shape.sizes)
        if (shape, derived) not in ready:
            value = torch.randn(shape.sizes, device=device).to(memory_format=shape.memory_format)
            ready[shape, derived] = value.requires_grad_(derived)
        return ready[shape, derived]

    def run() -> float:
        synchronise(device)
        begin = time.perf_counter()
        for step in steps:
            made: dict[tuple[int, ...], torch.Tensor] = {}
            for call in step.calls:
                if modes.get(call.network) != (call.training, call.learns):
                    call.network.train(call.training).requires_grad_(call.learns)
                    modes[call.network] = call.training, call.learns
                call.network.zero_grad(set_to_none=True)
                inputs = [given(*one, made) for one in zip(call.inputs, call.derived, strict=True)]
                with (
                    torch.set_grad_enabled(call.differentiated),
                    torch.autocast(device.type, torch.bfloat16, enabled=call.half),
                ):
                    output = call.network(*inputs)
                if output.requires_grad:
                    made[tuple(output.shape)] = output
            if step.backward and made:
                torch.stack([value.float().mean() for value in made.values()]).sum().backward()
        synchronise(device)
        return time.perf_counter() - begin

    return run


def measured(
    method: DataFreeMethod, start: Trainable, tasks: list[Task], device: torch.device, repeats: int
) -> dict[str, Any]:
    """Both sides in turn, so that whatever else the machine does falls on both."""
    with recorded(device) as steps:
        maker(method, start, tasks, device)()
    bare = bare_pass(steps, device)

    def whole() -> float:
        make = maker(method, start, tasks, device)
        synchronise(device)
        begin = time.perf_counter()
        make()
        synchronise(device)
        return time.perf_counter() - begin

    sides = {"bare": bare, "server": whole}
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            times[name].append(side())
    shares = [b / s for b, s in zip(times["bare"], times["server"], strict=True)]
    return {
        "forward_passes": sum(len(step.calls) for step in steps),
        "backward_passes": sum(step.backward for step in steps),
        "seconds_per_task": statistics.median(times["server"]),
        "bare_seconds": statistics.median(times["bare"]),
        "share_median": statistics.median(shares),
        "shares": shares,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--backbone", default="tiny", help="a YAML of conf/backbone (tiny, resnet18_cifar)")
    parser.add_argument("--methods", nargs="+", default=None, metavar="NAME", help="default: all that synthesise")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    parser.add_argument("overrides", nargs="*", help="after --: such as method.generator.steps=200")
    arguments = parser.parse_args()
    device = environment.choose_device(arguments.device)
    data = images_of(100)
    start = network_of(arguments.backbone, data)
    tasks = list(ClassIncremental().cut(data, 2, 0).tasks)
    result: dict[str, Any] = {
        "backbone": arguments.backbone,
        "device": environment.device_kind(device),
        "threads": torch.get_num_threads(),
        "overrides": arguments.overrides,
        "methods": {},
    }
    for name in arguments.methods or data_free_methods():
        found = measured(method_of(name, arguments.overrides), start, tasks, device, arguments.repeats)
        result["methods"][name] = found
        print(
            f"{name:>10}: {found['seconds_per_task']:8.2f} s per task; bare passes take"
            f" {100 * found['share_median']:.1f} % of it (median of {arguments.repeats}; aim: {100 * AIM:.0f} %)"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"generators-{arguments.backbone}-{device.type}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
