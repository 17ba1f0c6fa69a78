"""How long a server makes synthetic images before a task, and how much of it is the networks' own work.

`make bench-generators` measures TARGET, LANDER and MFCL (every method of conf/method whose server synthesises) at the
knobs of profile=quick; overrides after `--` change them. One run measures both sides, alternating: the whole start of a
second task, in which the server makes its images or trains its generator; and the bare forward and backward passes of
the same networks, on ready inputs of the same sizes. Which passes these are is recorded once, from the server itself;
that both sides run as many convolutions, forward and backward, is checked. The bare side has the generator's, the
teacher's, the student's and the lessons' passes; it leaves out batch norm statistics as loss terms, augmentation, steps
and copies.

On a CPU the share is that of processor seconds, so that other work on the machine changes it little.
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
from fcl_bench.backbones.backbone import Trainable
from fcl_bench.composition import config_dir
from fcl_bench.config import load_settings, target_class
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.methods.data_free.generative import DataFreeMethod
from fcl_bench.protocol.context import Context, Task, WireFormat

#: The smallest share of a server's time that bare passes should take.
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
    """Shape and memory format of a float tensor that was an input."""

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
    context = Context(start.dimension, 0, torch.float64, device, WireFormat(torch.float32), start)
    server = method.server(context)
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


def bare_pass(steps: list[Step], device: torch.device) -> Callable[[], None]:
    """The passes of these steps, on ready inputs; an input that was made by a network is made so again.

    Each backward pass goes through every network of its step through which the server's went: from all outputs that no
    other network of the step takes in, back to the first network of the step.
    """
    ready: dict[tuple[Shape, bool], torch.Tensor] = {}

    def given(shape: Any, derived: bool, made: list[torch.Tensor], taken: set[int]) -> Any:
        if not isinstance(shape, Shape):
            return shape
        # Several networks may take in what one has made: teacher and student the images, head and mapping the features.
        for number, value in enumerate(made):
            if derived and tuple(value.shape) == shape.sizes:
                taken.add(number)
                return value
        if (shape, derived) not in ready:
            value = torch.randn(shape.sizes, device=device).to(memory_format=shape.memory_format)
            ready[shape, derived] = value.requires_grad_(derived)
        return ready[shape, derived]

    def run() -> None:
        for step in steps:
            made: list[torch.Tensor] = []
            taken: set[int] = set()
            for call in step.calls:
                # Before every call: a network's mode is also its parts', which are called by themselves elsewhere.
                call.network.train(call.training).requires_grad_(call.learns)
                call.network.zero_grad(set_to_none=True)
                inputs = [given(*one, made, taken) for one in zip(call.inputs, call.derived, strict=True)]
                with (
                    torch.set_grad_enabled(call.differentiated),
                    torch.autocast(device.type, torch.bfloat16, enabled=call.half),
                ):
                    output = call.network(*inputs)
                if output.requires_grad:
                    made.append(output)
            ends = [value for number, value in enumerate(made) if number not in taken]
            if step.backward and ends:
                torch.stack([value.float().mean() for value in ends]).sum().backward()

    return run


def convolutions(run: Callable[[], object]) -> tuple[int, int]:
    """How many convolutions run forward and backward in this."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    found = {event.key: event.count for event in profile.key_averages()}
    return found.get("aten::convolution", 0), found.get("aten::convolution_backward", 0)


def measured(
    method: DataFreeMethod, start: Trainable, tasks: list[Task], device: torch.device, repeats: int
) -> dict[str, Any]:
    """Both sides run in turn, so that other load on the machine affects both."""
    with recorded(device) as steps:
        whole = convolutions(maker(method, start, tasks, device))
    bare = bare_pass(steps, device)
    # Warms up, as the recording has for the server.
    alone = convolutions(bare)
    if whole != alone:
        raise RuntimeError(f"the server runs {whole} convolutions forward and backward, the bare passes {alone}")
    sides: dict[str, Callable[[], object]] = {"bare": bare, "server": lambda: None}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        sides["server"] = maker(method, start, tasks, device)
        for name, side in sides.items():
            times[name].append(timed(side, device))
    # Of the processor's seconds, which other work on the machine moves less; on a GPU, of the clock's.
    counted = 1 if device.type == "cpu" else 0
    shares = [b[counted] / s[counted] for b, s in zip(times["bare"], times["server"], strict=True)]
    return {
        "forward_passes": sum(len(step.calls) for step in steps),
        "backward_passes": sum(step.backward for step in steps),
        "convolutions": whole,
        "seconds_per_task": statistics.median(clock for clock, _ in times["server"]),
        "processor_seconds_per_task": statistics.median(own for _, own in times["server"]),
        "bare_seconds": statistics.median(clock for clock, _ in times["bare"]),
        "share_median": statistics.median(shares),
        "shares": shares,
    }


def timed(side: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds of the clock, and of the processor."""
    synchronise(device)
    clock, processor = time.perf_counter(), time.process_time()
    side()
    synchronise(device)
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--backbone", default="tiny", help="a YAML of conf/backbone (tiny, resnet18_cifar)")
    parser.add_argument("--methods", nargs="+", default=None, metavar="NAME", help="default: all that synthesise")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="of the CPU; default: torch's")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    parser.add_argument("overrides", nargs="*", help="after --: such as method.generator.steps=200")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
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
            f"{name:>10}: {found['seconds_per_task']:8.2f} s per task ({found['processor_seconds_per_task']:.2f} s"
            " of the processor); bare passes take"
            f" {100 * found['share_median']:.1f} % of it (median of {arguments.repeats}; aim: {100 * AIM:.0f} %)",
            flush=True,
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"generators-{arguments.backbone}-{device.type}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
