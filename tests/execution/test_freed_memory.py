"""Freed blocks are used again, where glibc manages memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

#: Three matrices of 8 MiB come and go; says how many pages had to be zeroed for that.
_CODE = """
import resource, sys
import numpy as np
from fcl_bench.environment import reuse_freed_memory
if sys.argv[1] == "reused":
    reuse_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(20):
    held = [np.ones(2**20) for _ in range(3)]
    del held
print((faults() - before) * resource.getpagesize() / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library, which has no such thresholds")
def test_a_freed_block_is_the_next_one():
    zeroed = {}
    for way in ("as it is", "reused"):
        done = subprocess.run([sys.executable, "-c", _CODE, way], capture_output=True, text=True, check=True)
        zeroed[way] = float(done.stdout)
    assert zeroed["reused"] < 64  # MiB: the three, and what else there is
    assert zeroed["as it is"] > 2 * zeroed["reused"]
