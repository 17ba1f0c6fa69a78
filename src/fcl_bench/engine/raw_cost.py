"""The cost of sending a client's samples themselves, for comparison with its uploads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fcl_bench.protocol.wire import WireFormat, column_bytes

#: Of a label on the wire, an int32.
_LABEL = 4


@dataclass(frozen=True)
class RawSamples:
    """The cost of sending samples as they are, as `centralised_ridge` and `centralised` do.

    Attributes:
        kind: "features", or "images" for methods that train the network.
        sample_bytes: bytes of a sample with its label.
        upload_bytes: additional bytes of every upload: the scales of a 16-bit wire type.
    """

    kind: str
    sample_bytes: int
    upload_bytes: int = 0

    @classmethod
    def of(cls, inputs: torch.Tensor, wire: WireFormat) -> RawSamples:
        """The cost of samples like `inputs` (n, ...): images travel as bytes, features in the wire's type."""
        numbers = int(np.prod(inputs.shape[1:]))
        if inputs.dtype == torch.uint8:
            return cls("images", numbers + _LABEL)
        scales = numbers * column_bytes(0, wire.dtype)
        return cls("features", numbers * column_bytes(1, wire.dtype) - scales + _LABEL, scales)

    def cost(self, samples: np.ndarray) -> np.ndarray:
        """Bytes for these numbers of samples; 0 for no samples."""
        return samples * self.sample_bytes + np.where(samples > 0, self.upload_bytes, 0)

    def state(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)
