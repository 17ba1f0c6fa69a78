"""Networks as deterministic feature extractors: precision, memory layout and batches; and torch's compiler.

Importing this imports no compiler.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from fcl_bench.backbones.backbone import PRECISIONS, Extractor, Trainable, weights_hash
from fcl_bench.data.images.batches import Standardise, load_pixels
from fcl_bench.data.sources.base import Split
from fcl_bench.environment import autotunes, available_cores, exact_kernels
from fcl_bench.errors import UserError, first_line

#: What turns graphs into code; tests of everything else take one that needs no C++ compiler.
BACKEND = "inductor"
_KEY, _REMEDY = "backbone.compile=true", "backbone.compile=false"
#: Pixels per forward pass on a CPU; its caches hold no more: 4 images of 224 x 224, 196 of 32 x 32.
_CPU_PIXELS = 4 * 224 * 224
#: Images per forward pass on CUDA.
_GPU_BATCH = 256
#: Images per forward pass of a timm network on a CPU: MobileNetV2 does 118 images/s at 4 and 57 at 32 on two cores.
_CPU_BATCH = 4
#: Decoded batches that wait for a timm network: enough to overlap, few enough to keep memory flat.
BATCHES_AHEAD = 3


def require_compiler(device: torch.device) -> None:
    """Raise a `UserError` if torch's compiler lacks what it needs here: g++ or `CXX` on a CPU, Triton on a GPU."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError(f"{_KEY}: the package triton is not here, or does not know this GPU", _REMEDY)
        return
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx) is None:
        raise UserError(f"{_KEY}: a CPU takes a C++ compiler, and {cxx} is not there", f"g++, CXX=..., or {_REMEDY}")


def compile_body(
    body: torch.nn.Module, at_call: Callable[[torch.nn.Module, tuple[Any, ...]], None] | None = None
) -> None:
    """Have `body` run compiled from its next call on, whoever calls it; names, parameters and hooks stay as they are.

    A copy of `body` runs as written, until it is compiled itself. The number of images is open from the first batch on:
    numbers would otherwise depend on which sizes came before, and a resumed run would end with other bits.

    Args:
        at_call: called like a forward pre-hook, which compiled code would not run as written.

    Raises (when `body` is called):
        UserError: it cannot be compiled as a whole, so nothing runs as written unnoticed.
    """
    body.compile(fullgraph=True, backend=BACKEND)
    compiled = body._compiled_call_impl
    assert compiled is not None

    def call(images: torch.Tensor) -> torch.Tensor:
        if at_call:
            at_call(body, (images,))
        torch._dynamo.maybe_mark_dynamic(images, 0)
        try:
            features: torch.Tensor = compiled(images)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(f"{_KEY}: torch could not compile the network: {first_line(error)}", _REMEDY) from error
        return features

    body._compiled_call_impl = call


class FrozenNetwork(Extractor):
    """Extractor that runs a network in eval mode; subclasses define where the images come from.

    Args:
        body: the network, which belongs to the extractor from now on.
        dimension: d, the number of its features.
        precision: auto (float16 autocast on CUDA, float32 elsewhere), float32, float16 or bfloat16.
    """

    cacheable = True
    batch: int

    def __init__(
        self, body: torch.nn.Module, dimension: int, precision: str, device: torch.device, compiled: bool = False
    ) -> None:
        if precision == "auto":
            precision = "float16" if device.type == "cuda" else "float32"
        self.identity = {"weights": weights_hash(body), "precision": precision, "device": device.type}
        if autotunes(device):
            self.identity["cudnn"] = "autotuned"
        self._dimension = dimension
        self._device = device
        self._dtype = PRECISIONS[precision]
        # Convolutions run faster with channels last; a network without them (a ViT) does not care.
        layout = torch.channels_last
        self.body = body.eval().requires_grad_(False).to(device, memory_format=layout)  # type: ignore[call-overload]
        if compiled:
            self.identity["compiled"] = "true"
            compile_body(self.body)

    def dimension(self, split: Split) -> int:
        return self._dimension

    def batches(self, split: Split, start: int = 0) -> Iterator[torch.Tensor]:
        # A GPU gets the next batch before the host waits for the last one's features.
        ahead, pending = int(self._device.type == "cuda"), deque[_Returning]()
        for images in self._images(split, start):
            with torch.no_grad(), exact_kernels(), self._autocast():
                features = self.body(images)
            pending.append(_Returning(features))
            if len(pending) > ahead:
                yield pending.popleft().values()
        while pending:
            yield pending.popleft().values()

    @abstractmethod
    def _images(self, split: Split, start: int) -> Iterator[torch.Tensor]:
        """Standardised images (b, 3, size, size), channels last, on the device: samples start, start + 1, ..."""

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)


class NetworkExtractor(FrozenNetwork):
    """A copy of a trained body as an extractor over its training images (see `load_pixels`): whole, not augmented.

    Args:
        body: the network; it is copied, so that its training may continue.
    """

    def __init__(
        self, body: torch.nn.Module, trainable: Trainable, device: torch.device, precision: str = "auto"
    ) -> None:
        super().__init__(copy.deepcopy(body), trainable.dimension, precision, device, trainable.compiled)
        self.identity = {**trainable.identity, **self.identity}
        self._size = trainable.size
        self._standardise = Standardise(trainable.size, trainable.mean, trainable.std)
        self.batch = _GPU_BATCH if device.type == "cuda" else min(256, max(1, _CPU_PIXELS // trainable.size**2))

    def _images(self, split: Split, start: int) -> Iterator[torch.Tensor]:
        pixels = load_pixels(split, self._size)
        for begin in range(start, len(pixels), self.batch):
            batch = pixels[begin : begin + self.batch]
            yield self._standardise(_to_device(batch, self._device))


class TimmExtractor(FrozenNetwork):
    """A timm network over images that timm's transform resizes and crops.

    Args:
        data_config: timm's: input_size, crop_pct, interpolation, mean, std.
    """

    def __init__(
        self,
        body: torch.nn.Module,
        dimension: int,
        made_of: dict[str, str],
        data_config: dict[str, Any],
        precision: str,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        from timm.data import create_transform

        super().__init__(body, dimension, precision, device, compiled)
        transform = json.dumps(data_config, sort_keys=True, default=str)
        self.identity = {**made_of, **self.identity, "transform": transform}
        # The threads decode and resize to uint8; scaling happens on the device, in whole batches.
        self._transform = create_transform(**data_config, is_training=False, use_prefetcher=True)
        self._mean, self._std = (
            _image_of(data_config[name], data_config["input_size"], device) for name in ("mean", "std")
        )
        self.batch = _GPU_BATCH if device.type == "cuda" else _CPU_BATCH
        self.workers = available_cores()

    def _images(self, split: Split, start: int) -> Iterator[torch.Tensor]:
        for pixels in self._pixels(split, start):
            images = _to_device(torch.from_numpy(pixels), self._device)
            images = images.to(torch.float32, memory_format=torch.channels_last)
            yield images.div_(255).sub_(self._mean).div_(self._std)

    def _pixels(self, split: Split, start: int) -> Iterator[np.ndarray]:
        """uint8 batches (b, 3, size, size), decoded ahead of the network by threads."""
        inputs = split.inputs
        assert not isinstance(inputs, np.ndarray), "ready features have no pixels"
        # Rows of a table are read in slices, which is faster; every thread gets one slice of each batch.
        piece = max(1, self.batch // self.workers)

        def load(indices: range) -> list[np.ndarray]:
            return [self._transform(image.convert("RGB")) for image in inputs.decoded(indices)]

        with ThreadPoolExecutor(self.workers) as pool:
            waiting: deque[list[Future[list[np.ndarray]]]] = deque()
            try:
                for begin in range(start, len(split), self.batch):
                    end = min(begin + self.batch, len(split))
                    pieces = [range(first, min(first + piece, end)) for first in range(begin, end, piece)]
                    waiting.append([pool.submit(load, indices) for indices in pieces])
                    if len(waiting) > BATCHES_AHEAD:
                        yield _stacked(waiting.popleft())
                while waiting:
                    yield _stacked(waiting.popleft())
            finally:
                # An error or an interrupt must not wait for images that are no longer needed.
                pool.shutdown(wait=False, cancel_futures=True)


def _stacked(pieces: list[Future[list[np.ndarray]]]) -> np.ndarray:
    return np.stack([image for piece in pieces for image in piece.result()])


def _image_of(colour: tuple[float, float, float], shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Per-channel values expanded to (1, *shape), channels last; arithmetic with an image is then one pass over memory.

    With three broadcast numbers torch works pixel by pixel, which takes four times as long.
    """
    values = torch.tensor(colour, device=device).view(1, 3, 1, 1)
    return values.expand(1, *shape).contiguous(memory_format=torch.channels_last)


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, which are on the CPU, on the device; the host does not wait until they have arrived."""
    if device.type != "cuda":
        return values.to(device)
    # From memory that may be paged out CUDA copies in pieces, and the host waits for all but the last.
    return values.pin_memory().to(device, non_blocking=True)


class _Returning:
    """Values on their way to the host, for which a GPU does not wait. On the CPU they are there at once."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values.to("cpu", torch.float32) if values.device.type != "cuda" else self._queued(values)

    def _queued(self, values: torch.Tensor) -> torch.Tensor:
        host = torch.empty(values.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(values.float(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(values.device))
        return host

    def values(self) -> torch.Tensor:
        """They, on the CPU in float32; waits until they are there."""
        if self._event is None:
            return self._values
        self._event.synchronize()
        # Pinned memory is scarce, and is used again for the next batch.
        return self._values.clone()
