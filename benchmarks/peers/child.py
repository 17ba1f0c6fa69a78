"""One side of one row in a process of its own: `python -m benchmarks.peers.child SIDE SIZE ROW CHECKOUT`.

It answers each line that it reads with a line of JSON: "turn" is a run, timed; "result FILE" writes what the last one
learnt. What the side itself prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.settings import CPU, ROWS, Averaging
from benchmarks.peers.work import Adapter
from fcl_bench.environment import peak_memory, reset_peak_memory


def main() -> None:
    side, size, name, checkout = sys.argv[1:]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    row = ROWS[size][name]
    adapter: Adapter = importlib.import_module(f"benchmarks.peers.{side}")
    # The same at its smallest: from here on everything is imported, and memory is that of the work.
    adapter.prepared(ROWS["smoke"][name], Path(checkout)).run()
    # What every side is given; ours takes images as bytes, the others as float32.
    _ = (row.pixels if side == "ours" else row.images) if isinstance(row, Averaging) else row.features
    before, work = resident(), None
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "result":
            assert work is not None
            np.save(argument, work.result().numpy())
            print(json.dumps({}), file=answers, flush=True)
            continue
        work = None
        gc.collect()
        reset_peak_memory(CPU)
        work = adapter.prepared(row, Path(checkout))
        begin = time.process_time()
        work.run()
        seconds = time.process_time() - begin
        told = {"seconds": seconds, "bytes": peak_memory(CPU) - before}
        print(json.dumps(told), file=answers, flush=True)


def resident() -> int:
    """Bytes that this process has now, after what it no longer uses went back to the system where that can be asked."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory(CPU)
    return peak_memory(CPU)


if __name__ == "__main__":
    main()
