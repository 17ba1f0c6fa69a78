"""What clients that lie can do to each family of methods: accuracy lost, and success of a backdoor.

    make attacks
    python -m benchmarks attacks --out FILE.csv --features FEATURES.npz --classes 100 --tasks 10

An attacker runs the honest client code on samples of its own choice, and so sends what some data would give: no check
of a single upload can find that. It knows the method, the broadcast, its own samples and the classes of the task. It
chooses, with a validation set of honest samples like the server's, the strongest of these:

- labels: every sample gets the label of the next class of the task;
- labels x 10, labels x 100: and its inputs are as many times as long, so that its sums weigh more;
- labels boosted: where uploads are models, each is moved away from the broadcast by as many times as there are clients
  for each attacker, so that the mean arrives where the attacker wants (model replacement);
- trigger, and as strong as above: half of its samples of the last task get a fixed pattern and the label of the
  task's first class. Success is the share of the test samples of the task's other classes that get this label once they
  have the pattern.

With the clip as a defence (`noise=gaussian noise.multiplier=0`), which the server checks, an attacker may break it or
obey it ("clipped"). Against robust sums (`robust_groups`, `client_share`) it may also stay near to honest uploads, or
announce 20 copies of each sample and send the sums of all these ("copied"). Accuracies are of the test set; the
attacker chooses between strengths on validation samples alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pandas as pd
import torch

import fcl_bench
from benchmarks import report
from fcl_bench.engine import transport
from fcl_bench.engine.in_process import InProcess
from fcl_bench.errors import UserError
from fcl_bench.protocol.context import ClientData, Context
from fcl_bench.protocol.message import Message

#: What the methods that stand for their families need to run on few features.
HEADS = ("method.trains=features", "method.training.rounds=10")
METHODS: dict[str, tuple[str, ...]] = {
    **{"fedncm": (), "fedlda": (), "afl": (), "stsa": ("method.M=512",), "air": ("method.M=512",)},
    **{"fedran": ("method.M=512", "method.rank=64"), "gaussian_sketch": ("method.M=512", "method.rank=64")},
    **{"fedavg": HEADS, "scaffold": HEADS, "feddyn": HEADS},
}
KINDS = ("labels", "trigger")
KEYS = ["method", "defence", "attackers", "clients"]
COLUMNS = [*KEYS, "attack", "A_T", "validation", "success", "refused", "ended"]
#: Points of validation accuracy that nobody misses.
_UNNOTICED = 2
#: Those that average models, for which robust means exist.
AVERAGING = ("fedavg",)
#: Those whose uploads add up, for which robust sums exist, with the knobs that this takes.
SUMMING = {"fedncm": (), "fedlda": (), "afl": ("method.upload=sums",), "stsa": (), "air": ()}
#: Method -> the clip of its features, about their median length on the digits.
CLIPS = {"fedncm": 3.5, "fedlda": 3.5, "stsa": 56}
DEFENCES = {
    "none": (),
    "clip": ("noise=gaussian", "noise.multiplier=0", "noise.clip={clip}"),
    "robust_sum": ("robust_groups={clients}", "client_share={share}"),
    "median": ("method.training.aggregate=median",),
    "trimmed_mean": ("method.training.aggregate=trimmed_mean", "method.training.trimmed=0.3"),
    "krum": ("method.training.aggregate=krum", "method.training.byzantine={attackers}"),
}


@dataclasses.dataclass(frozen=True)
class Attack:
    """How an attacker changes its samples and its upload.

    Attributes:
        scale: its inputs are as many times as long.
        boosted: it moves a model away from the broadcast.
        trigger: it plants a backdoor in the last task in place of wrong labels in all.
        obeys: it shortens its features as the run asks, so that the server cannot tell.
        copies: of each of its samples, which it announces too.
    """

    scale: float = 1.0
    copies: int = 1
    boosted: bool = False
    trigger: bool = False
    obeys: bool = False

    @property
    def name(self) -> str:
        how = f" x {self.scale:g}" if self.scale != 1 else " boosted" if self.boosted else ""
        how += (", clipped" if self.obeys else "") + (", copied" if self.copies > 1 else "")
        return ("trigger" if self.trigger else "labels") + how


_STRENGTHS: tuple[dict[str, Any], ...] = ({}, {"scale": 10.0}, {"scale": 100.0}, {"boosted": True})
#: Against a defence: the strongest that the clip admits; what robust sums may take for honest.
_AGAINST: dict[str, tuple[dict[str, Any], ...]] = {
    "clip": ({"obeys": True}, {"scale": 100.0, "obeys": True}),
    "robust_sum": ({"scale": 2.0}, {"copies": 20}, {"scale": 10.0, "copies": 20}),
}


def attacks(method: str, defence: str, kinds: Collection[str] = KINDS) -> list[Attack]:
    """What is tried against a method with a defence. Boosted sums would be the sums of the first attack."""
    own = [how for how in _STRENGTHS if "boosted" not in how or method not in SUMMING]
    every = [*own, *_AGAINST.get(defence, ())]
    return [Attack(trigger=kind == "trigger", **how) for kind in KINDS if kind in kinds for how in every]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A stream, and who attacks it.

    Attributes:
        arguments: the overrides of all runs.
        clients, tasks, classes: K, T, and how many classes a task has.
        attackers: the clients with the lowest numbers.
    """

    arguments: tuple[str, ...]
    clients: int
    tasks: int
    classes: int
    attackers: int


def pattern(inputs: torch.Tensor) -> torch.Tensor:
    """(d,) the trigger: as long as the mean input, in a direction that everyone can draw."""
    direction = torch.randn(inputs.shape[1], generator=torch.Generator().manual_seed(99)).abs().to(inputs)
    length = torch.linalg.vector_norm(inputs, dim=1).mean()
    return direction * (length / torch.linalg.vector_norm(direction))


def poisoned(data: ClientData, attack: Attack, setting: Setting) -> ClientData:
    """The samples that an attacker feeds to the honest code."""
    first = data.task * setting.classes
    inputs, labels = data.inputs.clone(), data.labels.clone()
    if attack.trigger:
        half = len(labels) // 2
        if data.task == setting.tasks - 1 and half:
            inputs[:half] = attack.scale * (inputs[:half] + pattern(inputs))
            labels[:half] = first
        return dataclasses.replace(data, inputs=inputs, labels=labels)
    labels = first + (labels - first + 1) % setting.classes
    return dataclasses.replace(data, inputs=attack.scale * inputs, labels=labels)


def copied(data: ClientData, times: int) -> ClientData:
    """Each sample that often."""
    return dataclasses.replace(data, inputs=data.inputs.repeat(times, 1), labels=data.labels.repeat(times))


def moved(upload: Message, broadcast: Message, times: float) -> Message:
    """An upload whose tensors of the broadcast's model are `times` as far from it."""
    tensors = dict(upload.items())
    for name, tensor in upload.items():
        start = broadcast.get(name)
        if start is not None and start.shape == tensor.shape and tensor.is_floating_point():
            tensors[name] = start + times * (tensor - start)
    return upload.with_tensors(tensors)


@contextmanager
def attacked(attack: Attack | None, setting: Setting) -> Iterator[None]:
    """Within it, the first clients of every run attack."""
    node = transport.Node

    def hostile(client: Any, context: Context, *rest: Any) -> Any:
        honest: Callable[..., Any] = client.update
        # Code that does not shorten features, whatever the run asks for.
        lying = client.method.client(dataclasses.replace(context, release=None)).update
        update_of = honest if attack is not None and attack.obeys else lying

        def update(data: ClientData, broadcast: Message, state: Any) -> Any:
            if attack is None or data.client >= setting.attackers or not len(data.labels):
                return honest(data, broadcast, state)
            upload, state = update_of(copied(poisoned(data, attack, setting), attack.copies), broadcast, state)
            last = data.task == setting.tasks - 1
            boosted = attack.boosted and (last or not attack.trigger)
            return (moved(upload, broadcast, setting.clients / setting.attackers) if boosted else upload), state

        client.update = update
        return node(client, context, *rest)

    samples = InProcess.samples

    def announced(clients: InProcess, task: int) -> tuple[np.ndarray, np.ndarray]:
        times = np.where(np.arange(clients.clients) < setting.attackers, attack.copies if attack else 1, 1)
        held, labelled = samples(clients, task)
        return held * times, labelled * times

    with mock.patch.object(transport, "Node", hostile), mock.patch.object(InProcess, "samples", announced):
        yield


def measured(
    method: str, attack: Attack | None, setting: Setting, more: Sequence[str], out: Path
) -> dict[str, float | str]:
    """Percent of test and validation samples, the backdoor's success, uploads refused; or why the run ended."""
    with attacked(attack, setting):
        try:
            run = fcl_bench.run(
                method, overrides=[*setting.arguments, *METHODS[method], *more, f"out={out}", "force=true"]
            )
        except UserError as error:
            return {"ended": str(error)}
    tested, target = run.test_set(), run.model.labels[-setting.classes]
    inputs = torch.as_tensor(np.asarray(tested.inputs)).float()
    others = np.isin(tested.labels, run.model.labels[-setting.classes + 1 :])
    answers = run.predict((inputs + pattern(inputs))[others].numpy())
    return {
        "refused": run.record["dropped"]["uploads"],
        "A_T": run.metrics["A_T"],
        "validation": run.record["validation"]["metrics"]["A_T"],
        "success": 100 * float(np.mean(answers == target)),
    }


def rows(
    method: str, setting: Setting, more: Sequence[str], defence: str, kinds: Collection[str], out: Path
) -> Iterator[dict[str, Any]]:
    """One row for no attack, and one for each attack of some kinds, of one method with one defence."""
    for attack in (None, *attacks(method, defence, kinds)):
        found = measured(method, attack, setting, more, out)
        row = dict(zip(KEYS, (method, defence, setting.attackers, setting.clients), strict=True))
        yield {**row, "attack": attack.name if attack else "none", **found}


class Worst(NamedTuple):
    """The rows of one method, defence and number of attackers that count; None: no such attack ran to its end.

    Attributes:
        honest: without an attack.
        labels: the attack with the lowest validation accuracy.
        door: the backdoor with the most success among those that cost at most two points of it, since others are
            noticed.
    """

    honest: pd.Series
    labels: pd.Series | None
    door: pd.Series | None


def strongest(own: pd.DataFrame) -> Worst:
    """What counts of the rows of one method, defence and number of attackers."""
    honest = own[own["attack"] == "none"].iloc[0]
    labels = own[own["attack"].str.startswith("labels") & own["validation"].notna()]
    hidden = own["validation"] >= honest["validation"] - _UNNOTICED
    doors = own[own["attack"].str.startswith("trigger") & hidden]
    lowest = labels.loc[labels["validation"].idxmin()] if len(labels) else None
    return Worst(honest, lowest, doors.loc[doors["success"].idxmax()] if len(doors) else None)


def worst(found: pd.DataFrame) -> str:
    """A Markdown table: A_T without and with the attack that hurts most, and the backdoor, by method and share."""
    table = []
    for (method, defence, attackers, clients), own in found.groupby(KEYS, sort=False):
        honest, labels, door = strongest(own)
        line = [method, defence, f"{attackers} of {clients}", f"{honest['A_T']:.1f}"]
        line += ["-", "-"] if labels is None else [f"{labels['A_T']:.1f}", labels["attack"]]
        line += ["-", "-"] if door is None else [f"{door['success']:.0f} ({honest['success']:.0f})", door["attack"]]
        refused, ended = int((own["refused"] > 0).sum()), int(own["ended"].notna().sum())
        table.append([*line, f"{refused} / {ended}"])
    header = ["method", "defence", "attackers", "A_T", "attacked", "by", "backdoor", "by", "refused / ended"]
    return report.table(header, table, words=3)


def draw(found: pd.DataFrame, to: Path) -> None:
    """Two panels with a line per method and defence: A_T without and with liars, and their backdoors' success."""
    from matplotlib.figure import Figure

    names, points = [], []
    for place, ((method, defence), own) in enumerate(found.groupby(["method", "defence"], sort=False)):
        names.append(method if defence == "none" else f"{method}, {defence}")
        for liars, rows_of in own.groupby("attackers"):
            honest, labels, door = strongest(rows_of)
            hurt, success = (np.nan if row is None else row[key] for row, key in ((labels, "A_T"), (door, "success")))
            points += [(0, place, honest["A_T"], np.nan), (liars, place, hurt, success)]
    frame = pd.DataFrame(points, columns=["liars", "place", "A_T (%)", "backdoor: samples that get its label (%)"])
    figure = Figure(figsize=(8, 1 + 0.26 * len(names)), layout="constrained")
    panels, clients = figure.subplots(1, 2, sharey=True), found["clients"].iloc[0]
    for axes, column in zip(panels, frame.columns[2:], strict=True):
        ends = frame.groupby("place")[column].agg(["min", "max"])
        axes.hlines(ends.index, ends["min"], ends["max"], color="0.8", zorder=1)
        for marker, (liars, own) in zip("osD^v<>", frame.groupby("liars"), strict=False):
            label = f"{liars} of {clients} lie" if liars else "honest"
            axes.plot(own[column], own["place"], marker, mec="black", mfc="black" if liars else "white", label=label)
        axes.set(xlabel=column, xlim=(-3, 103))
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(to, dpi=120)


def possible(defence: str) -> Collection[str]:
    """The methods for which there is this defence."""
    return {"none": METHODS, "clip": CLIPS, "robust_sum": SUMMING}.get(defence, AVERAGING)


def digits(folder: Path) -> Path:
    """scikit-learn's digits, 64 pixels each, in the layout of `data=features`; every fifth is a test sample."""
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    test, file = np.arange(len(y)) % 5 == 0, folder / "digits.npz"
    np.savez(file, x_train=X[~test] / 16, y_train=y[~test], x_test=X[test] / 16, y_test=y[test])
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="What clients that lie can do: accuracy lost, and backdoors.")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, with commas between them")
    parser.add_argument("--features", type=Path, help="NPZ as of data.path; default: scikit-learn's digits")
    parser.add_argument("--classes", type=int, default=10, help="of the features")
    parser.add_argument("--attackers", default="1,3", help="numbers of attackers among the clients")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--attacks", default=",".join(KINDS), help="kinds, with commas between them")
    parser.add_argument("--defences", default=",".join(DEFENCES), help="names, with commas between them")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, required=True, help="CSV, one row per run; existing rows are kept; a picture beside it"
    )
    given = parser.parse_args()
    for key, known in {"methods": METHODS, "defences": DEFENCES, "attacks": KINDS}.items():
        if unknown := set(getattr(given, key).split(",")) - set(known):
            parser.error(f"--{key}: {', '.join(sorted(unknown))} (expected: some of {','.join(known)})")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("fcl_bench").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        features = given.features or digits(Path(scratch))
        stream = (f"clients={given.clients}", f"tasks={given.tasks}", "beta=1", "data.validation=0.2", "threads=1")
        stream += ("on_bad_upload=drop",)
        arguments = ("data=features", f"data.path={features}", *stream)
        done = pd.read_csv(given.out).to_dict("records") if given.out.exists() else []
        ready = {tuple(row[key] for key in KEYS) for row in done}
        for method in given.methods.split(","):
            for attackers in map(int, given.attackers.split(",")):
                setting = Setting(arguments, given.clients, given.tasks, given.classes // given.tasks, attackers)
                for defence, texts in DEFENCES.items():
                    key = (method, defence, attackers, given.clients)
                    if key in ready or method not in possible(defence) or defence not in given.defences.split(","):
                        continue
                    known = {"attackers": attackers, "clip": CLIPS.get(method), "share": 1.5 / given.clients}
                    more = [text.format(clients=given.clients, **known) for text in texts]
                    more += SUMMING[method] if defence == "robust_sum" else ()
                    done += rows(method, setting, more, defence, given.attacks.split(","), Path(scratch) / "out")
                    pd.DataFrame(done, columns=COLUMNS).to_csv(given.out, index=False)
    found = pd.DataFrame(done, columns=COLUMNS)
    print(worst(found))
    draw(found, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
