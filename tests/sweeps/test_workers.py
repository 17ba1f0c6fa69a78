"""Jobs side by side: threads and GPUs of the machine that they share."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from fcl_bench.sweeps import workers


@pytest.mark.parametrize(("jobs", "machine", "threads"), [(2, 8, "4"), (3, 8, "2"), (16, 8, "1")])
def test_threads_are_divided_and_wait_without_spinning(monkeypatch, plain_environment, jobs, machine, threads):
    # Set first, so that the test's end takes back whatever comes.
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOMP_SPINCOUNT", workers.SPIN)
    workers.share_cores(jobs, machine)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == (threads, "PASSIVE")
    assert "GOMP_SPINCOUNT" not in os.environ


def test_what_the_user_set_stays(monkeypatch, plain_environment):
    for name, value in (("OMP_NUM_THREADS", "3"), ("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "7")):
        monkeypatch.setenv(name, value)
    workers.share_cores(2, 8)
    assert [os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")] == [
        "3",
        "ACTIVE",
        "7",
    ]


@pytest.mark.parametrize(
    ("listed", "gpus"), [("0,1", ["0", "1"]), ("2", ["2"]), ("", []), ("-1", []), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])]
)
def test_the_gpus_that_the_environment_allows(monkeypatch, listed, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert workers.visible_gpus() == gpus


def test_the_gpus_that_the_driver_lists(monkeypatch, tmp_path, plain_environment):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU 0: A\\n  MIG 1g: (UUID: x)\\nGPU 1: A\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert workers.visible_gpus() == ["0", "1"]


def take(sweep: Path, device: str, pipe) -> None:
    """A worker: two jobs, then it waits to be let go."""
    seen = []
    for _ in range(2):
        workers.take_gpu(sweep, device)
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    pipe.send(seen)
    pipe.recv()


@pytest.mark.slow
def test_workers_take_turns_over_the_gpus_and_keep_theirs(tmp_path, monkeypatch, plain_environment):
    monkeypatch.setenv("FCL_BENCH_GPUS", "4,6")
    context = multiprocessing.get_context("fork")
    links, processes = [], []

    def begin(device: str):
        here, there = context.Pipe()
        processes.append(context.Process(target=take, args=(tmp_path, device, there)))
        processes[-1].start()
        links.append(here)
        assert here.poll(30)
        return here.recv()

    seen = [begin(device) for device in ("auto", "cuda", "auto", "cuda:1", "cpu")]
    assert seen == [["4", "4"], ["6", "6"], ["4", "4"], [None, None], [None, None]]
    processes[1].kill()
    processes[1].join()
    assert begin("auto") == ["6", "6"]  # the place of the one that died
    for index, process in enumerate(processes):
        if index != 1:
            links[index].send("go")
        process.join(30)
