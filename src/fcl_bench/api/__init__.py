"""The Python API: the same runs in the same folders as the command's; each finds the other's complete runs."""

from fcl_bench.api.making import run, sweep
from fcl_bench.api.recorded import Run, Tested, load, runs
from fcl_bench.errors import UserError
from fcl_bench.execution.predicting import Model

__all__ = ["Model", "Run", "Tested", "UserError", "load", "run", "runs", "sweep"]
