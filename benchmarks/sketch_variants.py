"""One table of the bytes and accuracy of variants of the centred sketch with a Gaussian remainder.

    .venv/bin/python benchmarks/sketch_variants.py --features FILE.npz --clients 5 --beta 0.1 --seeds 0 1 2
    .venv/bin/python benchmarks/sketch_variants.py --features FILE.npz --only base "i bits 4"

One pass over clients and tasks serves all variants: they share random features and decompositions, and each has its own
server. A variant is the base with some of its knobs changed (sketches/variants.py). Everything that a variant uploads
is rounded as it would be on the wire and counted; `up` is the most that one client sends for one task, `down` the most
that it receives. The base is the method of docs/methods/centred_sketch.md with remainder=gaussian and ridge=auto.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from sketches.coding import Coding
from sketches.experiment import experiment, markdown
from sketches.stream import Stream
from sketches.variants import variants

from fcl_bench.data.sources.array_files import FeatureFile


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True, help=".npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--M", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=32, help="r of the base")
    parser.add_argument("--input-rank", type=int, default=32, help="k of the base")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="names of variants, or beginnings of them")
    parser.add_argument("--without", nargs="+", default=[], help="variants that are left out, likewise")
    parser.add_argument("--coding", action="store_true", help="how far lossless coders shrink the first seed's factors")
    parser.add_argument("--out", type=Path, help="JSON to be written")
    options = parser.parse_args(arguments)
    chosen = variants(options.rank, options.input_rank)
    if options.only:
        chosen = [v for v in chosen if v.name.startswith(tuple(options.only))]
    chosen = [v for v in chosen if not v.name.startswith(tuple(options.without))]
    if not chosen:
        parser.error("no variant is left; there are " + "; ".join(v.name for v in variants()))
    data, coding, results = FeatureFile(path=str(options.features)).load(), Coding(options.rank), []
    for number, seed in enumerate(options.seeds):
        begin = time.perf_counter()
        stream = Stream.of(data, options.tasks, options.clients, options.beta, seed)
        shown = coding if options.coding and number == 0 else None
        results.append(experiment(stream, chosen, options.M, seed, shown)[0])
        print(f"seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
        if options.out:
            found = [{name: vars(result) for name, result in one.items()} for one in results]
            told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
            written = {"options": told, "coding": coding.rows() if options.coding else [], "results": found}
            options.out.write_text(json.dumps(written) + "\n")
    print(f"\nK {options.clients}, beta {options.beta:g}, M {options.M}, T {options.tasks}, seeds {options.seeds}\n")
    print(markdown(results))
    if options.coding:
        print("\n| coder | coded / raw |\n| --- | ---: |")
        print("\n".join(f"| {name} | {share:.3f} |" for name, share in coding.rows()))


if __name__ == "__main__":
    main()
