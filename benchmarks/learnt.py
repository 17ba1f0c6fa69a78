"""What an honest but curious server learns of single samples, from what each method sends: features, and membership.

    python -m benchmarks learnt FEATURES.npz

The samples are of the first ten classes of a file as of `data=features`. An upload is that of the client half itself,
as it travels in float32; `sum of ten` is what masks leave of ten clients' (`secure=sums`), and `noise` is
`noise=gaussian noise.epsilon=8`, with the median length of the features as clip.

Read off: the share of the samples of a client with 1, 3 or 20 samples of one class whose features are found to an
eighth of their length, by the best of what is known here: class sums and groups of one sample as they are; the rows of
a Gram matrix in which one sample alone is active (`feature_inversion.read_off`); the rotation of a sketch's plane that
fits the random features; and the change of a head's weights over that of its offsets.

Membership: of 64 uploads of 64 of 128 candidates each, who is in. Of an upload u and a candidate x the server computes
one number t(u, x), and compares the likelihoods of t in two normal distributions, fitted to the other uploads with and
without x (LiRA; Carlini et al., 2022). t is: how much of x lies outside the samples' span, from a Gram matrix, a
factor or a sketch; the likelihood ratio of a class sum; the largest cosine to a group's sum; the change of the model's
log-odds of x's class. AUC 50 is a guess; "found" is the share of members found where 1 % of others are taken for such.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_inversion import features_of, read_off

from benchmarks import report
from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.engine.codec import decoded, encoded
from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.algebra import coding
from fcl_bench.protocol.context import ClientData, Context, Task, WireFormat
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import Message

CLASSES, CLIENTS, UPLOADS, CANDIDATES, DRAWS = 10, 10, 64, 128, 2
#: The largest relative error of a feature that counts as read off.
FOUND = 1 / 8
HEAD = ("method.trains=features", "method.training.rounds=1", "method.training.weight_decay=0")
METHODS: dict[str, tuple[str, ...]] = {
    "fedncm": (),
    "afl": ("method.upload=sums",),
    "stsa": ("method.M=1250",),
    "stsa_e": ("method.M=1250", "method.dummy_clients=50"),
    "fedran": ("method.M=1250", "method.rank=64"),
    "gaussian_sketch": ("method.M=1250",),
    "fedavg": HEAD,
}
ALONE, SUMMED, NOISY = "alone", "sum of ten", "noise"


class Sender:
    """A method's clients, and what the server gets of them.

    Args:
        how: ALONE, SUMMED or NOISY.
        clip: of noise.

    Raises:
        UserError: the method has no sums, or no noise.
    """

    def __init__(self, method: str, how: str, inputs: int, clip: float) -> None:
        noise = ("noise=gaussian", "noise.epsilon=8", f"noise.clip={clip}") if how == NOISY else ()
        noise += ("noise.unit=client", "noise.clip=1") if how == NOISY and method == "fedavg" else ()
        secure = ("secure=sums",) if how == SUMMED else ()
        settings = load_settings(composed([f"method={method}", *METHODS[method], *noise, *secure]))
        self.method: Any = settings.method
        context = Context(inputs, 0, torch.float64, torch.device("cpu"), WireFormat(torch.float32), clients=CLIENTS)
        context = dataclasses.replace(context, sums=how == SUMMED, classes=CLASSES)
        if how == NOISY:
            settings.noise.check(self.method, context)
        if how == SUMMED:
            settings.secure.check(self.method, context, CLIENTS, False)
        self.context = dataclasses.replace(context, release=settings.noise.release(self.method, context))
        self._middleware = settings.noise.middleware(self.method, self.context, 1)
        self.server = self.method.server(self.context)
        task = Task(0, range(CLASSES), CLASSES)
        self.server.start_task(task)
        self.broadcast: Message = self.server.broadcast(task, 0)
        self._uploads = Uploads.of(self.method, self.context)
        self._sent = 0

    def upload(self, Z: np.ndarray, y: np.ndarray) -> Message:
        """What the server has of a client with the features Z (n, d) of the classes y (n,)."""
        inputs, self._sent = torch.from_numpy(Z), self._sent + 1
        data = ClientData(0, 0, inputs, torch.from_numpy(y), inputs[:0])
        upload, _ = self.method.client(self.context).update(data, self.broadcast, {})
        upload = dataclasses.replace(upload, stage=self.broadcast.stage, task=0, round=self._sent)
        for step in self._middleware:
            step.receive(self.broadcast, 0)
            upload = step.send(upload, 0)
        sent = encoded(upload, self.context.wire, self._uploads)
        return decoded(sent, self.context.dtype, self.context.device)

    def total(self, uploads: Sequence[Message]) -> Message:
        """What the server has of several clients."""
        return uploads[0] if len(uploads) == 1 else self.method.combination(self.context)(uploads)

    @cached_property
    def projection(self) -> np.ndarray | None:
        """P (d, M); None: the method takes the features themselves."""
        features = getattr(self.server, "random_features", None)
        found = None if features is None else features.projection
        return None if found is None else found.double().numpy()

    def mapped(self, Z: np.ndarray) -> np.ndarray:
        """(n, M) what the method makes of features."""
        return Z if self.projection is None else np.maximum(Z @ self.projection, 0)


def numpy_of(upload: Message) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in upload.items()}


def gram(sender: Sender, u: dict[str, np.ndarray]) -> np.ndarray | None:
    """The Gram matrix that an upload has, or the part of it that its factors have; None: it has none."""
    if "V" in u:
        return (u["V"] * u["sigma"] ** 2) @ u["V"].T
    shift = getattr(sender.method, "gamma", 0.0) if "C" in u and "B" in u else 0.0
    found = u.get("G", u["C"] if "B" in u else None)
    return None if found is None else found - CLIENTS**sender.context.sums * shift * np.eye(len(found))


def sums(u: dict[str, np.ndarray]) -> np.ndarray:
    """(M, c) the class sums."""
    return next(u[name] for name in ("S", "S_z", "B", "C") if name in u)


def class_factor(sender: Sender, upload: Message, label: int) -> np.ndarray:
    """(d, k) what the Gaussian sketch tells of the deviations of one class from its mean."""
    most = sender.method.class_rank * CLASSES
    factor = coding.decoded(upload["codes_z"], upload["steps"].tolist()[1], sender.context.inputs, most)
    ends = np.cumsum([0, *upload["widths"].tolist()])
    assert factor is not None
    return factor.numpy()[:, ends[label] : ends[label + 1]]


# Reading off ----------------------------------------------------------------------------------------------------------


def turned(sender: Sender, upload: Message, n: int) -> np.ndarray:
    """(n, d) three samples of one class from a Gaussian sketch: the rotation of their plane that fits H best."""
    mean, F_z = upload["S_z"].numpy()[:, 0] / n, class_factor(sender, upload, 0)
    if n != 3 or F_z.shape[1] != 2:
        return mean[None]
    F = coding.decoded(upload["codes"], upload["steps"].tolist()[0], sender.method.M, sender.method.rank)
    assert F is not None
    corners, best, least = np.linalg.svd(np.eye(n) - 1 / n)[0][:, :2], mean[None], np.inf
    for angle in np.linspace(0, 2 * np.pi, 90, endpoint=False):
        for mirrored in (1, -1):
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * [1, mirrored]
            Z = mean + corners @ turn @ F_z.T
            A = sender.mapped(Z)
            A = A - A.mean(0)
            difference = np.square(A @ A.T).sum() - 2 * np.square(A @ F.numpy()).sum()
            if difference < least:
                best, least = Z, difference
    return best


def candidates(sender: Sender, upload: Message, n: int) -> np.ndarray:
    """(m, d) features that the server reads off an upload of n samples of the first class."""
    u = numpy_of(upload)
    if "codes" in u:
        return turned(sender, upload, n)
    if sender.method.name == "fedavg":
        start = numpy_of(sender.broadcast)
        weights, offset = sorted(start, key=lambda name: -start[name].ndim)[:2]
        change = u[offset] - start[offset]
        return (u[weights] - start[weights])[change != 0] / change[change != 0, None]
    if "n" in u and u["n"].ndim == 2:  # by group
        found = u["C"].T.reshape(*u["n"].shape, -1)[:, 0] / np.maximum(u["n"][:, :1], 1)
        found = found[u["n"][:, 0] > 0]
    else:
        found = sums(u)[:, :1].T / n
        if (G := gram(sender, u)) is not None and n > 1:
            found = np.concatenate([found, read_off(G, sums(u)[:, 0], n)])
    return found if sender.projection is None else features_of(np.maximum(found, 0), sender.projection)


def read(sender: Sender, Z: np.ndarray, clients: int = 1) -> float:
    """Percent of the samples Z (n, d), shared out evenly, that are read off."""
    uploads = [sender.upload(part, np.zeros(len(part), dtype=np.int64)) for part in np.split(Z, clients)]
    found = candidates(sender, sender.total(uploads), len(Z))
    errors = np.linalg.norm(Z[:, None] - found[None], axis=2).min(1) / np.linalg.norm(Z, axis=1)
    return 100 * float((errors < FOUND).mean())


# Membership -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What the server knows of the population: H (n, M) of samples that are in no upload, and their classes."""

    H: np.ndarray
    y: np.ndarray

    @cached_property
    def means(self) -> np.ndarray:
        return np.stack([self.H[self.y == label].mean(0) for label in range(CLASSES)])

    @cached_property
    def precision(self) -> np.ndarray:
        """The inverse of the covariance within classes, with a tenth of the mean eigenvalue added."""
        A = self.H - self.means[self.y]
        scatter = A.T @ A / len(A)
        return np.linalg.inv(scatter + 0.1 * np.trace(scatter) / len(scatter) * np.eye(len(scatter)))


def outside(A: np.ndarray, H: np.ndarray, noise: float) -> np.ndarray:
    """(n,) -log h'(A + delta I)^-1 h: above 0 where h is one of the samples of which A is the Gram matrix."""
    delta = max(1e-6 * np.trace(A) / len(A), 2 * noise * len(A) ** 0.5)
    return -np.log(np.maximum((H * np.linalg.solve(A + delta * np.eye(len(A)), H.T).T).sum(1), 1e-12))


def statistic(sender: Sender, upload: Message, Z: np.ndarray, y: np.ndarray, known: Known) -> np.ndarray:
    """(n,) t of each candidate."""
    u, H = numpy_of(upload), sender.mapped(Z)
    release = sender.context.release
    if "codes" in u:
        found = np.zeros(len(Z))
        for label in range(CLASSES):
            own, mean = y == label, u["S_z"][:, label] / max(int(u["n"][label]), 1)
            F = class_factor(sender, upload, label)
            away = Z[own] - mean
            inside = away @ np.linalg.svd(F, full_matrices=False)[0] if F.shape[1] else np.zeros((len(away), 1))
            # Of a class of one sample the mean is the sample.
            least = 1e-9 * (Z[own] ** 2).sum(1)
            found[own] = -np.log(1 + 1e-6 - ((inside**2).sum(1) + least) / ((away**2).sum(1) + least))
        return found
    if sender.method.name == "fedavg":
        weights, offset = sorted(u, key=lambda name: -u[name].ndim)[:2]

        def odds(model: dict[str, np.ndarray]) -> np.ndarray:
            scores = Z @ model[weights].T + model[offset]
            own = scores[np.arange(len(y)), y]
            scores[np.arange(len(y)), y] = -np.inf
            return own - np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1)) - scores.max(1)

        return odds(u) - odds(numpy_of(sender.broadcast))
    if (A := gram(sender, u)) is not None:
        return outside(A, H, 0.0 if release is None else max(release.deviation.values()))
    if u["n"].ndim == 2:  # by group
        groups = u["C"].T.reshape(*u["n"].shape, -1)[:, y]
        lengths = np.maximum(np.linalg.norm(groups, axis=2), 1e-12)
        cosines = np.einsum("gnm,nm->gn", groups, H) / lengths / np.linalg.norm(H, axis=1)
        return -np.log(1 + 1e-9 - cosines.max(0))
    means = u["S"] / np.maximum(u["n"].ravel(), 1)
    return ((means.T - known.means)[y] @ known.precision * (H - known.means[y])).sum(1)


def likelihood_ratios(t: np.ndarray, member: np.ndarray) -> np.ndarray:
    """(q, n) of each number, by normal distributions of the same candidate's in the other uploads."""
    logs = []
    for inside in (member, ~member):
        others = inside.sum(0) - inside
        mean = ((t * inside).sum(0) - t * inside) / others
        variance = ((t**2 * inside).sum(0) - t**2 * inside) / others - mean**2
        variance = np.maximum(variance, 1e-12 + 1e-9 * t.var())
        logs.append(-((t - mean) ** 2) / variance / 2 - np.log(variance) / 2)
    return logs[0] - logs[1]


def quality(scores: np.ndarray, member: np.ndarray) -> tuple[float, float]:
    """AUC, and the share of members above 99 % of the others; both in percent."""
    members, others = scores[member], np.sort(scores[~member])
    below = np.searchsorted(others, members, "left") + np.searchsorted(others, members, "right")
    return 50 * float(below.mean()) / len(others), 100 * float((members > np.quantile(others, 0.99)).mean())


def membership(sender: Sender, Z: np.ndarray, y: np.ndarray, rest: tuple[np.ndarray, np.ndarray], clients: int) -> Any:
    """`quality` of the attack on uploads of half of the candidates Z (n, d), beside those of clients - 1 others."""
    rng = np.random.default_rng(0)
    known = Known(sender.mapped(rest[0]), rest[1])
    parts = rng.permutation(len(rest[0]))[: (2 * CLIENTS if clients > 1 else 0) * (CANDIDATES // 2)]
    bank = [sender.upload(rest[0][own], rest[1][own]) for own in parts.reshape(-1, CANDIDATES // 2)]
    t, member = np.zeros((UPLOADS, len(Z))), np.zeros((UPLOADS, len(Z)), dtype=bool)
    for row in range(UPLOADS):
        member[row, rng.permutation(len(Z))[: len(Z) // 2]] = True
        others = [bank[own] for own in rng.permutation(len(bank))[: clients - 1]]
        upload = sender.total([sender.upload(Z[member[row]], y[member[row]]), *others])
        t[row] = statistic(sender, upload, Z, y, known)
    return quality(likelihood_ratios(t, member), member)


def learnt(method: str, x: np.ndarray, y: np.ndarray) -> list[str]:
    """A line of the table."""
    rng = np.random.default_rng(1)
    order = rng.permutation(len(x))
    chosen, rest = order[:CANDIDATES], order[CANDIDATES:]
    firsts = [rng.permutation(np.flatnonzero(y == 0)) for _ in range(DRAWS)]
    line: dict[str, str] = {}
    for how in (ALONE, SUMMED, NOISY):
        try:
            clip = float(np.median(np.linalg.norm(Sender(method, ALONE, x.shape[1], 1).mapped(x[:500]), axis=1)))
            sender = Sender(method, how, x.shape[1], clip)
        except UserError:
            line |= {f"read {how}": "-", how: "-"}
            continue
        clients = CLIENTS if how == SUMMED else 1
        for n in (1, 3, 20) if how == ALONE else (clients,):
            key = f"read {n}" if how == ALONE else f"read {how}"
            line[key] = f"{np.mean([read(sender, x[draw[:n]], clients) for draw in firsts]):.0f}"
        auc, found = membership(sender, x[chosen], y[chosen], (x[rest], y[rest]), clients)
        line[how] = f"{auc:.0f} ({found:.0f})"
    keys = ("read 1", "read 3", "read 20", f"read {SUMMED}", f"read {NOISY}", ALONE, SUMMED, NOISY)
    return [method, *(line[key] for key in keys)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path, help="NPZ as of data.path")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, with commas between them")
    given = parser.parse_args()
    if unknown := set(given.methods.split(",")) - set(METHODS):
        parser.error(f"--methods: {', '.join(sorted(unknown))} (expected: some of {','.join(METHODS)})")
    logging.getLogger("fcl_bench").setLevel(logging.ERROR)
    with np.load(given.features) as file:
        own = file["y_train"] < CLASSES
        x, y = file["x_train"][own].astype(np.float64), file["y_train"][own].astype(np.int64)
    header = ["method", "1", "3", "20", "sum, 1", "noise, 1", "member", "member, sum", "member, noise"]
    print(report.table(header, [learnt(method, x, y) for method in given.methods.split(",")], words=1))


if __name__ == "__main__":
    main()
