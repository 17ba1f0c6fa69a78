"""A CUDA device simulated on the CPU: it counts what would make the host wait, and mixes devices no more than CUDA.

Tensors on it say that they are on `cuda:0`. They hold a tensor on the CPU, with which PyTorch computes everything; so
their numbers are the CPU's, and nothing can be learnt about CUDA's own kernels, their numbers or their seconds. What
can be learnt: operations that mix tensors of both devices fail as on CUDA, and so does `.numpy()` of a tensor of the
GPU; copies, kernels and the places where the host waits for the device are counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

CUDA, _CPU, _META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
#: Operations whose result's size depends on values, or that give the host a value: CUDA waits for them.
_WAITS = {
    "_local_scalar_dense": "item",
    "equal": "equal",
    "nonzero": "nonzero",
    "masked_select": "nonzero",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "histc": "histc",
    "repeat_interleave": "repeat_interleave",
    # Those without `_ex` look at the error code that cuSOLVER leaves on the device.
    "linalg_cholesky": "linalg",
    "_linalg_eigh": "linalg",
    "_linalg_svd": "linalg",
    "linalg_eig": "linalg",
    "linalg_lstsq": "linalg",
    "_linalg_check_errors": "linalg",
}
#: No kernel, besides views.
_NO_KERNEL = {"alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "_unsafe_view"}
_COPIES = {"_to_copy", "copy_", "_foreach_copy_", "_foreach_copy"}


class OnCuda(torch.Tensor):
    """A tensor that says it is on the GPU.

    Args:
        held: on the CPU; its memory is this tensor's.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, requires_grad: bool = False) -> OnCuda:
        # For PyTorch's own code in C++ it is on `meta`, which has no memory either, and which nothing else here uses.
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=_META,
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def is_meta(self) -> bool:
        return False

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnCuda({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OnCuda:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return self.cpu().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    # In C++ lists become tensors on `meta`, that is, of any numbers.
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        kind, place = dtype or self.dtype, device or CUDA
        return torch.tensor(data, dtype=kind, device=place, requires_grad=requires_grad)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def cuda(self, *_: Any, **__: Any) -> OnCuda:
        return self

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Outside of the simulation: backwards passes of another thread, or a test that looks at results.
        return _run(function, args, kwargs or {}, Counted())


def _indices(index: Any) -> Any:
    """An index whose lists are tensors."""
    if isinstance(index, tuple):
        return tuple(_indices(own) for own in index)
    return torch.tensor(index, device=CUDA) if isinstance(index, (list, range)) else index


class Counted:
    """What a program asked of the device.

    Attributes:
        waits: how often the host would wait for the device, by reason.
        uploads: copies from the host to the device.
        kernels: operations on tensors of the device other than views and copies between devices, by name. One may be
            several kernels, or none.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.uploads = 0
        self.kernels: Counter[str] = Counter()

    def __sub__(self, other: Counted) -> Counted:
        difference = Counted()
        difference.waits = self.waits - other.waits
        difference.uploads = self.uploads - other.uploads
        difference.kernels = self.kernels - other.kernels
        return difference

    def copy(self) -> Counted:
        return self - Counted()


class Simulation(TorchDispatchMode):
    """Computes on the CPU what is asked of `cuda`.

    Attributes:
        counted: since it was entered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(function, args, kwargs or {}, self.counted)


def _run(function: Any, args: tuple, kwargs: dict[str, Any], counted: Counted) -> Any:
    name = function._schema.name.removeprefix("aten::")
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}  # the CPU without a driver has none
    given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    there = [value for value in given if isinstance(value, OnCuda)]
    here = [value for value in given if not isinstance(value, OnCuda)]
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked)
    wanted = asked is not None and asked.type in ("cuda", "meta")
    if not there and not wanted:
        return function(*args, **kwargs)
    to_device = wanted or (asked is None and bool(there))
    if name in _COPIES:
        to_device = _count_copy(name, args, kwargs, bool(there), to_device, counted)
    else:
        _count(function, name, args, there, here, counted)
    if asked is not None:
        kwargs = {**kwargs, "device": _CPU}
    result = function(
        *tree_map_only(OnCuda, lambda value: value.held, args),
        **tree_map_only(OnCuda, lambda value: value.held, kwargs),
    )
    if not to_device:
        return result
    return _as_given(function, args, kwargs, result)


def _count_copy(name: str, args: tuple, kwargs: dict[str, Any], there: bool, to_device: bool, counted: Counted) -> bool:
    """Count a copy, and say whether its result is on the device."""
    if name == "_to_copy":
        number, source_there, target_there = 1, there, to_device
        queued = False
    else:
        target, source = args[0], args[1]
        if isinstance(target, (list, tuple)):
            number = len(target)
            source_there = any(isinstance(value, OnCuda) for value in source)
            target_there = any(isinstance(value, OnCuda) for value in target)
        else:
            number, source_there, target_there = 1, isinstance(source, OnCuda), isinstance(target, OnCuda)
        # Into pinned memory, as is not checked here.
        queued = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if source_there and not target_there:
        if not queued:
            counted.waits["copy to the host"] += number
    elif target_there and not source_there:
        counted.uploads += number
    else:
        counted.kernels[name] += 1
    return target_there


def _count(
    function: Any, name: str, args: tuple, there: list[OnCuda], here: list[torch.Tensor], counted: Counted
) -> None:
    """Count an operation of the device, and refuse what CUDA refuses."""
    indexing = name in ("index", "index_put", "index_put_", "_index_put_impl_")
    if indexing:
        indices = [value for value in args[1] if value is not None]
        if any(value.dtype in (torch.bool, torch.uint8) for value in indices):
            counted.waits["nonzero"] += 1
        if isinstance(args[0], OnCuda):
            lying = [value for value in indices if not isinstance(value, OnCuda)]
            counted.uploads += len(lying)
            here = [value for value in here if not any(value is index for index in lying)]
        elif any(isinstance(value, OnCuda) for value in indices):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    if there and any(value.ndim for value in here):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
        )
    if reason := _WAITS.get(name):
        counted.waits[reason] += 1
    if not function.is_view and name not in _NO_KERNEL:
        counted.kernels[name] += 1


def _as_given(function: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
    """The result on the device: a tensor that was changed in place is the given one."""
    given = {id(value.held): value for value in tree_iter((args, kwargs)) if isinstance(value, OnCuda)}

    def there(value: torch.Tensor) -> torch.Tensor:
        return given.get(id(value)) if id(value) in given else OnCuda(value)

    return tree_map_only(torch.Tensor, there, result)


def _generator_state(*_: Any) -> torch.Tensor:
    return torch.default_generator.get_state()


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """In this block `torch.inference_mode` is `torch.no_grad`: the simulation's tensors have no version to count."""

    def enter(self: Any) -> None:
        self.before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode and self.before)

    def leave(self: Any, *_: Any) -> None:
        torch.set_grad_enabled(self.before)

    with mock.patch.multiple("torch.inference_mode", __enter__=enter, __exit__=leave):
        yield


@contextmanager
def simulated_cuda() -> Iterator[Counted]:
    """In this block there is a device `cuda`, and what is asked of it is counted."""
    simulation = Simulation()

    def synchronise(*_: Any) -> None:
        simulation.counted.waits["synchronize"] += 1

    class Event:
        """Its time is that at which it is recorded: the simulation has done everything by then."""

        def __init__(self, enable_timing: bool = False) -> None:
            self.at = 0.0

        def record(self, stream: Any) -> None:
            self.at = time.perf_counter()

        def synchronize(self) -> None:
            synchronise()

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    patches: dict[str, Callable[..., Any]] = {
        "Event": Event,
        "current_stream": lambda *_: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_initialized": lambda: False,
        "_lazy_init": lambda: None,
        "get_device_name": lambda *_: "simulated on the CPU",
        "synchronize": synchronise,
        "is_bf16_supported": lambda *_, **__: True,
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
        "empty_cache": lambda: None,
        "get_rng_state": _generator_state,
        "set_rng_state": lambda *_: None,
    }
    # As fake tensors do: without these, PyTorch's own code in C++ asks the driver which device is current, and
    # `torch.tensor(..., device="cuda")` allocates there.
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with (
            mock.patch.multiple("torch.cuda", **patches),
            mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: self),
            _no_inference_mode(),
            simulation,
        ):
            yield simulation.counted
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
