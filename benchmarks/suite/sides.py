"""The sides of one case, timed in turn: ours, the bare work that can't be avoided, plain code for the same.

A busy or throttled machine slows whatever runs at the moment. So the sides take turns within every round, a ratio is
that of one round, and the median over the rounds is what is told.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

#: The timed function; its result is dropped.
Work = Callable[[], object]

OURS, LIMIT, PEER = "ours", "limit", "peer"


@dataclass
class Side:
    """One of the things that a case times.

    Attributes:
        role: "ours", "limit" (the bare products and factorisations) or "peer" (plain code for the same result).
        what: in words, for the table.
        prepare: returns what is timed, anew for every round; its own seconds do not count.
        share: of the work that `prepare`'s result does; what it takes is divided by this.
        flops: operations that the whole work can't avoid, for rates; None: not told.
        seconds: per round, of the whole work.
        processor: the same in seconds of all cores together, children included.
    """

    role: str
    what: str
    prepare: Callable[[], Work]
    share: float = 1.0
    flops: float | None = None
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def time(self, device: torch.device) -> None:
        """One round."""
        work = self.prepare()
        synchronise(device)
        begin, processor = time.perf_counter(), processor_seconds()
        work()
        synchronise(device)
        self.seconds.append((time.perf_counter() - begin) / self.share)
        self.processor.append((processor_seconds() - processor) / self.share)

    def keep(self, rounds: int) -> None:
        """Keep only the last `rounds` rounds timed so far; those before them were warm-up."""
        self.seconds, self.processor = self.seconds[-rounds:], self.processor[-rounds:]

    def record(self) -> dict[str, Any]:
        """The values that a result file keeps."""
        return {name: value for name, value in vars(self).items() if name != "prepare"}


def ours(what: str, prepare: Callable[[], Work], flops: float | None = None) -> Side:
    """The library's own code."""
    return Side(OURS, what, prepare, flops=flops)


def limit(what: str, prepare: Callable[[], Work], flops: float | None = None, share: float = 1.0) -> Side:
    """Bare products and factorisations of the same sizes and precision."""
    return Side(LIMIT, what, prepare, share, flops)


def peer(what: str, prepare: Callable[[], Work], share: float = 1.0) -> Side:
    """Plain code for the same result."""
    return Side(PEER, what, prepare, share)


def each(work: Work) -> Callable[[], Work]:
    """Work that changes nothing, so every round can do it again as it is."""
    return lambda: work


def sizes(**by_size: list[Mapping[str, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The cases of a benchmark: for `--size` smoke, quick and full, and with `--long`. Full has quick's as well.

    Each case maps names of sizes (n, d, M, r, K, C, dtype, ...) to values.
    """
    unknown = set(by_size) - {"smoke", "quick", "full", "long"}
    if unknown:
        raise ValueError(f"no such sizes: {', '.join(sorted(unknown))}")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        function.cases = by_size  # type: ignore[attr-defined]
        return function

    return decorate


def case_name(stage: str, case: Mapping[str, Any]) -> str:
    """`statistics: n=10000 d=512 M=5000 float32`, under which two result files are compared."""
    parts = [str(value) if name in ("dtype", "method", "what") else f"{name}={value}" for name, value in case.items()]
    return f"{stage}: {' '.join(parts)}"


class Beside:
    """Times the sides of one case, in turn, as one entry of pytest-benchmark.

    pytest-benchmark times ours; before each of its rounds the other sides have theirs.

    Args:
        benchmark: pytest-benchmark's fixture.
        stage: the benchmark's name.
        case: its sizes.
        device: to be waited for at both ends of every measurement.
        rounds, warmup: measured rounds, and rounds before them that do not count (in which peers do not run).
    """

    def __init__(
        self,
        benchmark: Any,
        stage: str,
        case: Mapping[str, Any],
        device: torch.device,
        rounds: int = 5,
        warmup: int = 1,
    ) -> None:
        self._benchmark = benchmark
        self._device = device
        self._rounds, self._warmup = rounds, warmup
        self._record = {"name": case_name(stage, case), "stage": stage, "sizes": dict(case), "device": device.type}

    def __call__(self, first: Side, *others: Side, values: Mapping[str, float] | None = None) -> None:
        """Time `first`, ours, beside the others; `values` are further numbers of the case, such as an error."""
        assert first.role == OURS, f"the first side is {first.role}, not ours"
        assert all(side.role != OURS for side in others), "one side is ours"
        work: list[Work] = []
        begun = 0

        def prepare() -> None:
            nonlocal begun
            begun += 1
            for side in others:
                # A side that takes many times as long as the others shows no cold start, and skipping a round of it
                # saves minutes.
                if side.role != PEER or begun > self._warmup:
                    side.time(self._device)
            work[:] = [first.prepare()]
            synchronise(self._device)

        def run() -> None:
            begin = processor_seconds()
            work[0]()
            synchronise(self._device)
            first.processor.append(processor_seconds() - begin)

        self._benchmark.pedantic(run, setup=prepare, rounds=self._rounds, warmup_rounds=self._warmup)
        if self._benchmark.stats is not None:  # None: --benchmark-disable
            first.seconds = list(self._benchmark.stats.stats.data)
        for side in (first, *others):
            side.keep(self._rounds)
        self._benchmark.group = self._record["stage"]
        self._benchmark.extra_info.update(
            self._record, sides=[side.record() for side in (first, *others)], values=dict(values or {})
        )

    def add_values(self, values: Mapping[str, float]) -> None:
        """Add further numbers of the case that are known only after its sides were timed."""
        self._benchmark.extra_info["values"].update(values)


def time_in_turn(sides: Sequence[Side], device: torch.device, rounds: int = 5, warmup: int = 1) -> None:
    """Time sides in turn outside pytest; a side has its seconds then."""
    for _ in range(warmup + rounds):
        for side in sides:
            side.time(device)
    for side in sides:
        side.keep(rounds)


def processor_seconds() -> float:
    """Processor seconds of this process and of its finished children, over all cores."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def synchronise(device: torch.device) -> None:
    """Wait for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_case(sizes: Mapping[str, Any]) -> SimpleNamespace:
    """A case as attributes, with `dtype` as torch's."""
    named = SimpleNamespace(**sizes)
    if "dtype" in sizes:
        named.dtype = getattr(torch, sizes["dtype"])
    return named
