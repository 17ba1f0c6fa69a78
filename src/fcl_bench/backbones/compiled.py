"""Networks through torch's compiler: `backbone.compile=true`. Importing it imports no compiler."""

from __future__ import annotations

import os
import shutil

import torch

from fcl_bench.errors import UserError, first_line

#: What turns graphs into code; tests of everything else take one that needs no C++ compiler.
BACKEND = "inductor"
_KEY, _REMEDY = "backbone.compile=true", "backbone.compile=false"


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


def compile_body(body: torch.nn.Module) -> None:
    """Have `body` run compiled from its next call on, whoever calls it; names, parameters and hooks stay as they are.

    A copy of `body` runs as written, until it is compiled itself. The number of images is open from the first batch on:
    numbers would otherwise depend on which sizes came before, and a resumed run would end with other bits.

    Raises (when `body` is called):
        UserError: it cannot be compiled as a whole, so nothing runs as written unnoticed.
    """
    body.compile(fullgraph=True, backend=BACKEND)
    compiled = body._compiled_call_impl
    assert compiled is not None

    def call(images: torch.Tensor) -> torch.Tensor:
        torch._dynamo.maybe_mark_dynamic(images, 0)
        try:
            features: torch.Tensor = compiled(images)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(f"{_KEY}: torch could not compile the network: {first_line(error)}", _REMEDY) from error
        return features

    body._compiled_call_impl = call
