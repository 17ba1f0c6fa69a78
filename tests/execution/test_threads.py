"""How many threads of the CPU a run's method computes with."""

import json
import os
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from fcl_bench import environment
from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.engine.node import Node
from fcl_bench.errors import UserError
from fcl_bench.execution.plan import make_plan
from fcl_bench.execution.run import run
from fcl_bench.files import file_checksum

#: What is the same of two runs of the same bits; the other files have seconds.
EXACT = ("model.safetensors", "confusion.npz", "accuracy_matrix.csv")


@pytest.fixture
def three():
    """This process has three threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def settings(*overrides):
    return load_settings(composed(["data=digits", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        (["method=fedran"], 1),
        (["method=afl"], 1),
        (["method=stsa", "method.M=2048"], 1),
        (["method=stsa", "method.M=2049"], None),  # its Gram matrix has more than 2^22 numbers
        (["method=fedran", "method.M=4096"], None),  # H of all samples has
        (["method=fedavg", "backbone=tiny"], None),
        (["method=afl", "threads=2"], 2),
        (["method=fedavg", "backbone=tiny", "threads=3"], 3),
    ],
)
def test_the_sizes_and_the_key_decide(overrides, threads):
    assert make_plan(settings(*overrides)).context.threads == threads


def test_the_key_is_no_part_of_the_run_id():
    assert make_plan(settings("method=afl")).id == make_plan(settings("method=afl", "threads=2")).id


@pytest.mark.parametrize("given", ["0", "few", "1025", "1.5"])
def test_another_number_is_refused(given):
    with pytest.raises(UserError, match=f"threads={given}"):
        settings(f"threads={given}")


@pytest.mark.slow_cases("overrides2-3")
@pytest.mark.parametrize(("overrides", "threads"), [([], 1), (["threads=2"], 2), (["method.M=70000"], 3)])
def test_a_run_computes_with_them_and_records_them(tmp_path, monkeypatch, three, overrides, threads):
    found, turn = set(), Node.turn

    def watched(*arguments):
        blas = {library["num_threads"] for library in environment._blas_libraries().info()}
        found.add((torch.get_num_threads(), frozenset(blas)))
        return turn(*arguments)

    monkeypatch.setattr(Node, "turn", watched)
    blas = environment._blas_libraries().info()
    few = ["clients=2", "tasks=2", f"out={tmp_path}", "method=fedncm"]
    record = run(settings(*few, *overrides)).record
    usual = frozenset(library["num_threads"] for library in blas)
    assert found == {(threads, usual if threads == 3 else frozenset({threads}))}
    assert record["environment"]["threads"] == threads
    assert torch.get_num_threads() == 3
    assert environment._blas_libraries().info() == blas


@pytest.mark.slow
def test_a_first_stage_trains_with_the_threads_of_the_process(tmp_path, monkeypatch, three):
    found, turn = [], Node.turn
    monkeypatch.setattr(Node, "turn", lambda *given: (found.append(torch.get_num_threads()), turn(*given))[1])
    stage = ["adapt=fedavg", "backbone=tiny", "backbone.width=4", "adapt.training.rounds=1", "cache.enabled=false"]
    run(settings("clients=2", "tasks=2", "method=fedncm", *stage, f"out={tmp_path}"))
    assert found == [3, 3, 1, 1, 1, 1]


def test_blocks_of_several_threads_share_the_number_and_the_last_restores_it(three):
    blas = environment._blas_libraries().info()
    inside, leave, found = threading.Event(), threading.Event(), []

    def work():
        with environment.computing(1):
            inside.set()
            leave.wait()
            found.append(torch.get_num_threads())

    other = threading.Thread(target=work)
    with environment.computing(1):
        other.start()
        inside.wait()
        with environment.computing(1), environment.computing(None):
            assert torch.get_num_threads() == 1
        leave.set()
        other.join()
        found.append(torch.get_num_threads())
    assert found == [1, 1]
    assert torch.get_num_threads() == 3
    assert environment._blas_libraries().info() == blas


def test_of_two_threads_that_begin_at_once_one_sets_the_number(monkeypatch):
    """Both had counted their blocks before either looked whether its own was the first, so that none set BLAS's."""
    both, own = threading.Barrier(2), threading.local()

    class Slow:
        """A lock after whose first use a thread waits until the other one has used it, too."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *raised: object) -> None:
            self.lock.release()
            if not hasattr(own, "waited"):
                own.waited = True
                both.wait(10)

    class Libraries:
        def limit(self, limits: int) -> AbstractContextManager[None]:
            given.append(limits)
            return nullcontext()

    def work() -> None:
        with environment.computing(1):
            both.wait(10)  # so that neither has ended before the other has begun

    given: list[int] = []
    monkeypatch.setattr(environment, "_blas_libraries", Libraries)
    monkeypatch.setattr(environment._THREADS, "lock", Slow())
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert given == [1]


@pytest.mark.slow
def test_a_small_run_has_the_same_bits_with_any_number_of_cores(tmp_path):
    checksums = []
    for threads in (1, 2):
        out = tmp_path / str(threads)
        command = [sys.executable, "-m", "fcl_bench", "data=digits", "tasks=2", "method.M=1024", f"out={out}"]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True, capture_output=True)
        (folder,) = [path.parent for path in (out / "runs").glob("*/run.json")]
        assert json.loads((folder / "run.json").read_text())["environment"]["threads"] == 1
        checksums.append([file_checksum(folder / name) for name in EXACT])
    assert checksums[0] == checksums[1]
