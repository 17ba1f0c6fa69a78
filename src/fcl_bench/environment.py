"""The environment of a run: cores, device, versions, threads, commit, peak memory. Importing it imports no torch."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import fcl_bench
from fcl_bench.errors import UserError

if TYPE_CHECKING:
    import torch
    from threadpoolctl import ThreadpoolController


#: From glibc's malloc.h: the size from which a block comes from the system, and how much freed memory goes back to it.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: The largest value that glibc accepts for the second; the first is twice that.
_REUSED_BLOCK = 2**25
#: GNU OpenMP's limit on spinning that `spin_briefly` sets.
SPIN = "1000"


class Environment(TypedDict):
    """The `environment` of a run record: versions of packages, and the machine."""

    fcl_bench: str
    git_commit: str | None  # `-dirty`: uncommitted changes; several of a run resumed under other code; None: installed
    python: str
    torch: str
    numpy: str
    timm: str
    torchvision: str
    hydra_core: str
    platform: str
    device: str  # "cpu", or the GPU's model
    threads: int  # of the method on the CPU
    cudnn: str | None  # how cuDNN chose its algorithms: deterministic, autotuned; None without a GPU


#: The values of `cudnn=`.
CUDNN_CHOICES = ("deterministic", "autotuned")
_CUDNN: ContextVar[str] = ContextVar("cudnn", default="deterministic")

#: Cached, since a look into the folders of all packages takes milliseconds.
_version = functools.cache(version)


def available_cores() -> int:
    """Cores that this process may use (a cluster's job has fewer than its machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spin_briefly() -> None:
    """Have this process's threads wait almost without spinning, unless the user has set how they wait.

    Threads that wait by spinning take the cores from each other: two default runs at once on two cores took 110 s each,
    and 9 s each with this short spin, while a run alone is no slower (it is with OMP_WAIT_POLICY=PASSIVE, which never
    spins). Call this before torch is imported, since GNU OpenMP, which torch uses on Linux, reads it then.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
        # The threads of SciPy's OpenBLAS also sleep sooner: after 2^20 cycles instead of 2^26. With it, a FedRAN run
        # alone took 6 % less time, and 15 % less processor time.
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")


def choose_device(name: str) -> torch.device:
    """`device=`: auto takes the first GPU if there is one. Raises a `UserError` for a device that is not there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name} is not known", "auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device={name} is not there: {torch.cuda.device_count()} CUDA devices found",
            "device=auto or device=cpu",
        )
    return device


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AMX, AVX-512), and `ONEDNN_MAX_CPU_ISA` does not forbid that.

    torch says so from 2.11 on, before that Linux in `cpuinfo`.
    """
    import torch

    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if not any(kind in most for kind in ("BF16", "FP16", "AMX", "AVX10", "ALL", "DEFAULT")):
        return False
    if hasattr(torch.cpu, "get_capabilities"):
        there = {name for name, found in torch.cpu.get_capabilities().items() if found}
    else:
        lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
        there = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return not there.isdisjoint(("amx_bf16", "avx512_bf16"))


@contextmanager
def choosing_kernels(cudnn: str) -> Iterator[None]:
    """A block in which cuDNN chooses its algorithms as `cudnn=` says: deterministic, or autotuned."""
    before = _CUDNN.set(cudnn)
    try:
        yield
    finally:
        _CUDNN.reset(before)


def autotunes(device: torch.device) -> bool:
    """Whether cuDNN's algorithms are chosen by their time on this device, so that results may round otherwise."""
    return device.type == "cuda" and _CUDNN.get() == "autotuned"


def exact_kernels() -> AbstractContextManager[object]:
    """Context for a block that runs a network: the same command gives the same numbers, and float32 means float32.

    TF32 would make a GPU's features differ from a CPU's in the third digit, and autotuning picks other algorithms: it
    is left to `cudnn=autotuned` (`choosing_kernels`), which gives up the first promise.
    """
    import torch

    tuned = _CUDNN.get() == "autotuned"
    return torch.backends.cudnn.flags(enabled=True, benchmark=tuned, deterministic=not tuned, allow_tf32=False)


def exact_attention(device: torch.device) -> AbstractContextManager[object]:
    """Context for a block that trains a network: on a GPU, fused attention adds its gradients in any order.

    It is left to `cudnn=autotuned`, too. On a CPU nothing changes.
    """
    if device.type != "cuda" or autotunes(device):
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def reuse_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MiB for reuse; with another C library this does nothing.

    glibc itself raises the two thresholds to this only once a block of that size has been freed. Until then matrices of
    some MiB go back to the system with every message and are zeroed page by page when the next one comes: up to a third
    of STSA's processor time at M 1,024 (docs/results/benchmarks.md). No result depends on it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # another C library
        return
    for option, value in ((_MMAP_THRESHOLD, _REUSED_BLOCK), (_TRIM_THRESHOLD, 2 * _REUSED_BLOCK)):
        mallopt(option, value)


class _Threads:
    """How many blocks limit this process's threads, and what ends with the last of them."""

    def __init__(self) -> None:
        self.lock, self.blocks, self.restore = threading.Lock(), 0, ExitStack()


_THREADS = _Threads()


@contextmanager
def computing(threads: int | None) -> Iterator[None]:
    """A block in which torch and SciPy's BLAS use this many threads of the CPU; None: as many as before.

    Blocks within blocks, and those of several Python threads, share the number: the first one keeps what was there, and
    the last one that ends restores it. A Python thread whose block ends before another's keeps the number until then.
    """
    if threads is None:
        yield
        return
    import torch

    state, libraries = _THREADS, _blas_libraries()
    with state.lock:
        # In one step with the count, or of two threads that begin at once each takes the other's block for the first.
        if not state.blocks:
            state.restore.callback(torch.set_num_threads, torch.get_num_threads())
            state.restore.enter_context(libraries.limit(limits=threads))
        state.blocks += 1
    try:
        # OpenMP keeps the number for each Python thread.
        torch.set_num_threads(threads)
        yield
    finally:
        with state.lock:
            state.blocks -= 1
            if not state.blocks:
                state.restore.close()


@functools.cache
def _blas_libraries() -> ThreadpoolController:
    """NumPy's and SciPy's BLAS, which torch.set_num_threads does not reach; looking for them takes milliseconds."""
    import scipy.linalg  # noqa: F401  # a library that is loaded later would not be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def device_kind(device: torch.device) -> str:
    """The kind of device, on which measured seconds depend: "cpu", or the GPU's model."""
    import torch

    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def describe(device: torch.device) -> Environment:
    """The `environment` of a run record."""
    import torch

    return {
        "fcl_bench": fcl_bench.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "timm": _version("timm"),
        "torchvision": _version("torchvision"),
        "hydra_core": _version("hydra-core"),
        "platform": platform.platform(),
        "device": device_kind(device),
        "threads": torch.get_num_threads(),
        "cudnn": _CUDNN.get() if device.type == "cuda" else None,
    }


@functools.cache
def git_commit() -> str | None:
    """The commit of the source checkout that is running (with `-dirty` for uncommitted changes); None if installed.

    It is read on the first call: later changes of the checkout are not in the running code.
    """
    package = Path(fcl_bench.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    # A virtual environment inside some other checkout is not that checkout.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    return commit and (f"{commit}-dirty" if git("status", "--porcelain") else commit)


def reset_peak_memory(device: torch.device) -> None:
    """Start counting the peak anew, so that jobs of one sweep don't inherit each other's."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # Not Linux: only the process's peak since its start is known.
        return


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak since the reset: allocated by torch on a GPU, resident in the whole process on a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
