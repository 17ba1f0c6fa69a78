"""Shared fixtures: the real data beside the checkout, small data sets, the command in this process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from fcl_bench.cli.knobs import search_also
from tests.processor_seconds import (  # noqa: F401  # hooks of pytest
    pytest_collection_modifyitems,
    pytest_runtest_call,
    pytest_terminal_summary,
)
from tests.quick_composition import hasten

# No test reaches a network; code that tries fails at once instead of retrying.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# `precision=auto` is float32 on every CPU, so that numbers in tests are the same.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
# As the command does, before torch is imported: tests may share their cores with other work.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers divide the cores among themselves. Whatever the caller has set: sums round by the number of threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Those two would come before it; and no screen is as wide as workers are told, since there is none.
    for name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "COLUMNS"):
        os.environ.pop(name, None)

# How fast examples are drawn says how busy the machine is.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


def shared(path: str) -> Path:
    """A file of ../shared; the test is skipped, visibly, where it is absent."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"{found} is absent")
    return found


# Tests skip by importing what they need, and absl's log handler closes what was stderr then: pytest's own, if it were
# not the process's (see `fcl_bench.options.noise.gaussian`).
with redirect_stderr(sys.__stderr__), suppress(ModuleNotFoundError):
    import_module("absl.logging")


#: The environment variable that hands the value of `--fcl-method` to the tests of conformance.
METHOD_VARIABLE = "FCL_BENCH_TESTED_METHOD"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fcl-method",
        metavar="MODULE:CLASS",
        help="a method from outside of the repository, for tests/conformance -k outside",
    )


def pytest_configure(config: pytest.Config) -> None:
    if named := config.getoption("--fcl-method"):
        if not re.fullmatch(r"[\w.]+:\w+", named):
            raise pytest.UsageError(f"--fcl-method {named} is not MODULE:CLASS, such as my_method:MyMethod")
        os.environ[METHOD_VARIABLE] = named


def torch_threads() -> int | None:
    """How many threads torch computes with; None before its import."""
    return sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None


THREADS = pytest.StashKey[int | None]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[THREADS] = torch_threads()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test that leaves torch another number of threads fails: later ones would round their sums otherwise."""
    found = yield
    before, after = item.stash[THREADS], torch_threads()
    if before not in (None, after):
        sys.modules["torch"].set_num_threads(before)
        pytest.fail(f"the test left torch with {after} threads, and found it with {before}", pytrace=False)
    return found


hasten()


@pytest.fixture
def in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A command in this process: its `main`, its name, arguments -> (exit code, stdout, stderr)."""

    def call(main: Callable[[], int], name: str, *arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        try:
            code = main()
        finally:
            search_also([], [])  # they are the process's
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def command(in_process: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """`fcl-bench` in this process: arguments -> (exit code, stdout, stderr)."""
    from fcl_bench.cli.app import main

    return partial(in_process, main, "fcl-bench")


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """Runs of this process draw none, which is half of a short one's time, unless a test asks for `pictures`."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:  # otherwise nothing that was collected runs anything
            patch.setattr("fcl_bench.execution.run.drawn", lambda *_: {})
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw theirs."""
    from fcl_bench.execution.pictures import drawn

    monkeypatch.setattr("fcl_bench.execution.run.drawn", drawn)


@pytest.fixture
def feature_file(tmp_path: Path) -> Path:
    """A small, separable feature file: 6 classes with labels of any size, 12 features."""
    return write_features(tmp_path / "features.npz")


def write_features(path: Path, samples: int = 240, seed: int = 0, **changes: np.ndarray) -> Path:
    """A feature file with 6 classes; `changes` replace its arrays."""
    rng = np.random.default_rng(seed)
    labels = np.array([3, 7, 11, 400, 5, 0])
    centres = 3 * rng.standard_normal((6, 12))
    arrays: dict[str, np.ndarray] = {}
    for side, count in (("train", samples), ("test", samples // 4)):
        which = np.arange(count) % 6
        arrays[f"x_{side}"] = (centres[which] + rng.standard_normal((count, 12))).astype(np.float32)
        arrays[f"y_{side}"] = labels[which]
    np.savez(path, **{**arrays, **changes})
    return path
