"""Which of the processes that a launcher started this one is: torchrun's variables, or Slurm's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from fcl_bench.errors import UserError

_REMEDY = "torchrun --nproc-per-node N -m fcl_bench ..., or srun fcl-bench ... in a Slurm job"


@dataclass(frozen=True)
class Rank:
    """A process among those of a run.

    Attributes:
        number: from 0, which has the server.
        size: how many there are.
        local: its number on its machine.
        address, port: where they all meet.
    """

    number: int
    size: int
    local: int
    address: str
    port: int


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Which process this one is.

    Raises:
        UserError: no launcher has said, or what it says makes no sense.
    """
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if names[0] in environment and names[1] in environment:
            number, size, local = (_number(environment, name) for name in names)
            if not 0 <= number < size:
                raise UserError(f"{names[0]}={number} is no rank of {names[1]}={size}", _REMEDY)
            return Rank(number, size, local, _address(environment), _port(environment))
    raise UserError("transport=ranks, and nothing says which rank this process is", _REMEDY)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isascii() or not text.isdigit():
        raise UserError(f"{name}={text} is no number", _REMEDY)
    return int(text)


def _address(environment: Mapping[str, str]) -> str:
    if address := environment.get("MASTER_ADDR"):
        return address
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes and "[" not in nodes:
        return nodes.split(",")[0]
    if nodes and shutil.which("scontrol"):
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        if listed.returncode == 0 and listed.stdout.split():
            return listed.stdout.split()[0]
    raise UserError(
        "transport=ranks, and nothing says where the ranks meet",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    )


def _port(environment: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environment:
        return _number(environment, "MASTER_PORT")
    # Two jobs on one machine are not to meet.
    return 20_000 + _number(environment, "SLURM_JOB_ID") % 20_000
