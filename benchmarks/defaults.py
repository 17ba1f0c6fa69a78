"""Measure every method with its old defaults, its present ones, and tuned: the table of docs/results/defaults.md.

python -m benchmarks defaults features --path FEATURES.npz
python -m benchmarks defaults images

Two small streams, two seeds. Tuning is `fcl-bench tune` with the same number of trials for every method, on validation
samples and a seed of its own. Runs are kept in --out; the same command goes on where it stopped, and two processes may
share the work with --part 0/2 and --part 1/2. The images are the digits that scikit-learn ships.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

import fcl_bench
from fcl_bench.errors import UserError
from fcl_bench.leaderboard.running import Job, search

SEEDS = (0, 1)
#: How many classes, and images of each, the stream on features is of.
CLASSES, PER_CLASS = 50, 200
STREAMS = {
    "features": ["data=features", "tasks=10", "clients=5", "beta=0.5"],
    "images": ["data=digits", "tasks=5", "clients=5", "beta=0.5", "backbone=tiny", "backbone.width=8"],
}
BUDGET = {
    "features": ["method.training.rounds=20", "method.training.epochs=2"],
    "images": ["method.training.rounds=12", "method.training.epochs=2", "method.training.batch_size=16"],
}
#: The defaults until revision 553f859d.
SEEN = ["method.loss_classes=seen", "method.training.momentum=0"]
PLAIN = ["method.training.momentum=0"]
OLD = {
    **dict.fromkeys(("fedavg", "fedprox", "fedntd", "moon", "feddisco", "fedgen"), SEEN),
    "scaffold": SEEN[:1],
    "feddyn": [*SEEN[:1], "method.alpha=0.1", "method.reset=false"],
    "fedewc": [*SEEN, "method.normalise=none", "method.fisher_max=1e-4", "method.strength=1000"],
    "regmean": [*SEEN, "method.damping=1"],
    "fedlwf": PLAIN,
    "target": PLAIN,
    "centralised": PLAIN,
    "fedicarl": [*PLAIN, "method.classify=softmax"],
    "glfc": ["method.training.lr=0.01"],
    "lga": ["method.training.lr=0.01"],
    "fot": ["method.threshold_step=0.01"],
}
#: What a method needs beside the stream's budget: less memory than samples, generators that a CPU can train.
OWN = {
    "fedicarl": ["method.memory=100"],
    "glfc": ["method.memory=100", "method.proxy=none"],
    "lga": ["method.memory=100", "method.proxy=none"],
    "fedgen": ["method.generator.steps=10"],
    "fot": ["method.columns=64"],
    "fedprotip": ["method.columns=64"],
    "target": [
        *("method.synthesis.images=256", "method.synthesis.batch=64", "method.synthesis.warmup=2"),
        *("method.synthesis.kd_steps=20", "method.synthesis.lr_student=0.02"),
    ],
    "lander": [
        *("method.training.batch_size=16", "method.anchor_size=128", "method.synthesis.batch=32"),
        *("method.synthesis.warmup=2", "method.synthesis.batches=12", "method.synthesis.g_steps=10"),
        "method.synthesis.kd_steps=10",
    ],
    "mfcl": [
        *("method.synthetic=32", "method.generator.width=32", "method.generator.noise=100"),
        *("method.generator.scale=0.5", "method.generator.batch_size=64", "method.generator.steps=200"),
    ],
}
AVERAGING = ["fedavg", "fedprox", "scaffold", "feddyn", "feddisco", "fedntd", "fedewc", "fedlwf", "fedspace"]
EXEMPLARS = ["fedicarl", "glfc", "lga"]
CLOSED = ["afl", "afcl", "air", "ds_al", "fedran", "stsa", "stsa_e", "ranpac", "centred_sketch", "gaussian_sketch"]
CLOSED += ["fedncm", "fedlda", "fedklda", "fedfecam", "centralised_ridge", "centralised_softmax"]
METHODS = {
    "features": [*AVERAGING, "regmean", *EXEMPLARS, *CLOSED, "fedgen"],
    "images": [*AVERAGING, "moon", "fedgen", *EXEMPLARS, "fot", "fedprotip", "target", "lander", "mfcl", "centralised"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=STREAMS)
    parser.add_argument("--path", type=Path, help="of the features")
    parser.add_argument("--out", type=Path, default=Path("outputs/defaults"))
    parser.add_argument("--trials", type=int, default=8, help="of each search; 0: none")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th method from the I-th on")
    asked = parser.parse_args()
    fixed = ["device=cpu", f"out={asked.out}"]
    if asked.stream == "features":
        if asked.path is None:
            parser.error("features needs --path FEATURES.npz")
        fixed.append(f"data.path={_small(asked.path, asked.out)}")
    part, parts = map(int, asked.part.split("/"))
    print(
        "| method | old defaults | defaults | tuned | gates with the defaults |\n|---|---:|---:|---:|---|", flush=True
    )
    for method in (asked.methods or METHODS[asked.stream])[part::parts]:
        print(_row(method, asked.stream, fixed, asked.trials), flush=True)


def typed(method: str, stream: str, *fixed: str) -> list[str]:
    """The overrides of a run with the present defaults."""
    trains = stream == "images" or method not in CLOSED
    heads = ["method.trains=features"] if trains and stream == "features" else []
    return last(
        [
            f"method={method}",
            *STREAMS[stream],
            *fixed,
            *(BUDGET[stream] if trains else []),
            *OWN.get(method, []),
            *heads,
        ]
    )


def last(overrides: list[str]) -> list[str]:
    """Each key once, with its last value."""
    return list({text.partition("=")[0]: text for text in overrides}.values())


def _row(method: str, stream: str, fixed: list[str], trials: int) -> str:
    """A method's A_T, the mean of the seeds, in each column."""
    present = typed(method, stream, *fixed)
    new, gates = _accuracy(present)
    old = _accuracy([*present, *OLD[method]])[0] if method in OLD else new
    tuned = _accuracy([*present, *_tuned(method, present, trials)])[0] if trials else ""
    return f"| `{method}` | {old} | {new} | {tuned} | {', '.join(sorted(gates))} |"


def _accuracy(overrides: list[str]) -> tuple[str, set[str]]:
    """The mean final accuracy in per cent, or what the run was refused for; and the gates."""
    found, gates = [], set()
    for seed in SEEDS:
        try:
            run = fcl_bench.run(overrides=last(overrides), seed=seed)
        except UserError as error:
            return f"failed: {str(error)[:60]}", gates
        found.append(run.metrics["A_T"])
        gates |= {gate["gate"] for gate in run.record["gates"]}
    return f"{statistics.fmean(found):.1f}", gates


def _tuned(method: str, present: list[str], trials: int) -> list[str]:
    """The knobs that `fcl-bench tune` chooses."""
    out = next(text.removeprefix("out=") for text in present if text.startswith("out="))
    job = Job(method, "tuned", "small", {}, 0, [text for text in present if not text.startswith("out=")])
    return [f"{key}={value}" for key, value in search(job, Path(out), trials).items()]


def _small(path: Path, out: Path) -> Path:
    """The first samples of some classes of a file of features, as a file of its own."""
    made = out / "features.npz"
    if not made.exists():
        whole, parts = np.load(path), {}
        classes = np.sort(np.random.default_rng(0).permutation(100)[:CLASSES])
        for part, count in (("train", PER_CLASS), ("test", PER_CLASS // 2)):
            labels = whole[f"y_{part}"]
            rows = np.sort(np.concatenate([np.flatnonzero(labels == one)[:count] for one in classes]))
            parts |= {f"x_{part}": whole[f"x_{part}"][rows], f"y_{part}": np.searchsorted(classes, labels[rows])}
        made.parent.mkdir(parents=True, exist_ok=True)
        np.savez(made, **parts)
    return made


if __name__ == "__main__":
    main()
