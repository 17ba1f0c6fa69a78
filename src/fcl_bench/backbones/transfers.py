"""Copies between the host and a GPU for which neither waits: through pinned memory, beside the GPU's computation."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, which are on the CPU, on the device; the host does not wait until they have arrived."""
    if device.type != "cuda":
        return values.to(device)
    # From memory that may be paged out CUDA copies in pieces, and the host waits for all but the last.
    return values.pin_memory().to(device, non_blocking=True)


class Returning:
    """Values on their way to the host.

    On the CPU they are there at once. A GPU does what it is asked next while they travel.

    Args:
        values: on any device.
    """

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
