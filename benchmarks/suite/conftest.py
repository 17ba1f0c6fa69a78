"""Options, cases and fixtures of the suite; writes the table beside pytest-benchmark's JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# As the command does, before torch is imported: threads that spin would take the cores from those that work.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch

from fcl_bench import environment
from suite import results, table
from suite.sides import Beside, as_case, case_name

REPOSITORY = Path(__file__).resolve().parents[2]
#: Of the session's result, for the end of the output.
_RESULT = pytest.StashKey[results.Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fcl-bench")
    group.addoption("--size", choices=("smoke", "quick", "full"), default="quick", help="which cases (default: quick)")
    group.addoption("--long", action="store_true", help="also the cases that take many minutes: peak memory")
    group.addoption("--rounds", type=int, default=5, help="measured rounds of every case (default: 5)")
    group.addoption("--full-peers", action="store_true", help="measure slow peers whole, not a share of their work")
    group.addoption("--device", default="cpu", help="cpu, cuda, cuda:N (default: cpu)")
    group.addoption(
        "--features",
        type=Path,
        default=REPOSITORY.parent / "shared" / "data" / "cifar100-mobilenetv2.npz",
        help="feature file of the whole runs (CIFAR-100, d 512 or more)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    by_size = getattr(metafunc.function, "cases", None)
    if by_size is None:
        return
    chosen = metafunc.config.getoption("size")
    names = {"smoke": ["smoke"], "quick": ["quick"], "full": ["quick", "full"]}[chosen]
    if metafunc.config.getoption("long"):
        names.append("long")
    cases = [case for name in names for case in by_size.get(name, [])]
    metafunc.parametrize("sizes_", cases, ids=["-".join(map(str, case.values())) for case in cases])


@pytest.fixture
def case(sizes_: Mapping[str, Any]) -> SimpleNamespace:
    """The sizes of the case as attributes."""
    return as_case(sizes_)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return environment.choose_device(request.config.getoption("device"))


@pytest.fixture
def full_peers(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("full_peers")


@pytest.fixture
def features_file(request: pytest.FixtureRequest) -> Path:
    file: Path = request.config.getoption("features")
    if not file.exists():
        pytest.skip(f"{file} is absent (--features FILE)")
    return file.resolve()


@pytest.fixture
def cpu_only(device: torch.device) -> None:
    """A stage that never sees the GPU is measured on the CPU alone."""
    if device.type != "cpu":
        pytest.skip("the stage has no GPU side")


@pytest.fixture
def beside(benchmark: Any, request: pytest.FixtureRequest, sizes_: Mapping[str, Any], device: torch.device) -> Beside:
    """Times the sides of the case; to be called once."""
    stage = request.node.originalname.removeprefix("bench_")
    rounds, warmup = request.config.getoption("rounds"), 1
    if getattr(request.module, "ONCE", False):
        rounds, warmup = 1, 0
    return Beside(benchmark, stage, sizes_, device, rounds, warmup)


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("benchmark_json"):
        file.parent.mkdir(parents=True, exist_ok=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out benchmarks without a case of this size; refuse two cases that a result file could not tell apart."""
    sizes = {item: item.callspec.params["sizes_"] for item in items if hasattr(item, "callspec")}
    empty = [item for item in items if item in sizes and not isinstance(sizes[item], Mapping)]
    config.hook.pytest_deselected(items=empty)
    items[:] = [item for item in items if item not in empty]
    names = [case_name(item.originalname, sizes[item]) for item in items if item in sizes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise pytest.UsageError(f"cases of one name: {', '.join(sorted(twice))}")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add facts on which the seconds depend to pytest-benchmark's own."""
    device = environment.choose_device(config.getoption("device"))
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    machine_info["fcl_bench"] = {
        **environment.describe(device),
        "cores": environment.available_cores(),
        "blas": blas[1] if blas else "unknown",
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "size": config.getoption("size"),
        "rounds": config.getoption("rounds"),
    }


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Write the table beside the JSON."""
    result = results.of_json(output_json, "this session")
    config.stash[_RESULT] = result
    if file := config.getoption("benchmark_json"):
        file.with_suffix(".md").write_text(table.markdown(result))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _RESULT in config.stash:
        terminalreporter.write_line("")
        terminalreporter.write(table.markdown(config.stash[_RESULT]))
