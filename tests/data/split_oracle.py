"""Slow, plain re-statements of the splits, written from the papers' text: a loop step a class or a sample.

They take their random numbers in the order in which the code takes them, so both must agree on every sample. Each
returns the task of every training and of every test sample; None: of no task.
"""

from __future__ import annotations

import math

from fcl_bench.data.sources.base import Dataset
from fcl_bench.randomness import generator

Tasks = tuple[list[int | None], list[int | None]]


def _order(dataset: Dataset, seed: int, shuffle: bool = True) -> list[int]:
    classes = sorted(set(dataset.train.labels.tolist()))
    return generator(seed, "class order").permutation(classes).tolist() if shuffle else classes


def class_incremental(dataset: Dataset, tasks: int, seed: int, first: int | None, shuffle: bool) -> Tasks:
    """Disjoint classes; the first task has `first`, the others as many each, earlier ones one more of a remainder."""
    order = _order(dataset, seed, shuffle)
    home: dict[int, int] = {}
    for task in range(tasks):
        if first is None:
            size = len(order) // tasks + (1 if task < len(order) % tasks else 0)
        elif task == 0:
            size = first
        else:
            size = (len(order) - first) // (tasks - 1) + (1 if task - 1 < (len(order) - first) % (tasks - 1) else 0)
        for _ in range(size):
            home[order[len(home)]] = task
    train, test = ([home.get(label) for label in side.labels.tolist()] for side in (dataset.train, dataset.test))
    return train, test


def class_overlap(dataset: Dataset, tasks: int, seed: int, shared: int) -> Tasks:
    """FedProTIP D.6: "one class overlaps across each task boundary (10 classes per task, 11 tasks total)"."""
    order = _order(dataset, seed)
    total = len(order) + (tasks - 1) * shared
    classes_of: list[list[int]] = []
    begin = 0
    for task in range(tasks):
        size = total // tasks + (1 if task < total % tasks else 0)
        classes_of.append(order[begin : begin + size])
        begin += size - shared
    sides: list[list[int | None]] = []
    for number, side in enumerate((dataset.train, dataset.test)):
        rng = generator(seed, "shared classes", number)
        labels = side.labels.tolist()
        keys, coins = rng.random(len(labels)), rng.integers(0, 2, len(labels))
        answer: list[int | None] = [None] * len(labels)
        # Samples of unknown classes come first in the order of the code, and take random numbers too.
        done = sum(label not in order for label in labels)
        for label in order:
            members = sorted((i for i, other in enumerate(labels) if other == label), key=lambda i: keys[i])
            its_tasks = [task for task in range(tasks) if label in classes_of[task]]
            assert 1 <= len(its_tasks) <= 2
            for rank, sample in enumerate(members):
                turn = (rank + int(coins[done])) % 2
                answer[sample] = its_tasks[turn] if len(its_tasks) == 2 else its_tasks[0]
            done += len(members)
        sides.append(answer)
    return sides[0], sides[1]


def si_blurry(
    dataset: Dataset, tasks: int, seed: int, disjoint: float, blurry: float, sizes: str, reassign: str
) -> Tasks:
    """GACL, on the setting of Moon et al.: "first randomly partitions all classes into two groups [...] Then disjoint
    classes and blurry classes are randomly assigned [...] Next, each blurry task further conducts the blurry sample
    division by randomly extracting part of samples to assign to other blurry tasks".
    """
    order = _order(dataset, seed)
    number = round(disjoint * len(order))
    groups = [order[:number], order[number:]]
    of_blurry = [
        len(groups[1]) // tasks + (1 if task >= tasks - len(groups[1]) % tasks else 0) for task in range(tasks)
    ]
    rng = generator(seed, "si-blurry sizes")
    if sizes == "equal":
        of_disjoint = [number // tasks + (1 if task < number % tasks else 0) for task in range(tasks)]
    else:
        least = [1 if size == 0 else 0 for size in of_blurry]
        free = number - sum(least)
        bars = set(rng.choice(free + tasks - 1, tasks - 1, replace=False).tolist())
        of_disjoint, task = list(least), 0
        for place in range(free + tasks - 1):
            if place in bars:
                task += 1
            else:
                of_disjoint[task] += 1
    points = [0.0, *sorted(rng.random(tasks - 1).tolist()), 1.0]
    shares = [points[task + 1] - points[task] for task in range(tasks)]
    home: dict[int, int] = {}
    for group, counts in zip(groups, (of_disjoint, of_blurry), strict=True):
        rest = list(group)
        for task in range(tasks):
            for _ in range(counts[task]):
                home[rest.pop(0)] = task
    sides: list[list[int | None]] = []
    for side_number, side in enumerate((dataset.train, dataset.test)):
        labels = side.labels.tolist()
        answer = [home.get(label) for label in labels]
        if tasks > 1:
            rng = generator(seed, "si-blurry samples", side_number)
            movable = [i for i, label in enumerate(labels) if label in groups[1]]
            leaving: list[int] = []
            if sizes == "equal":
                keys = dict(zip(movable, rng.random(len(movable)), strict=True))
                coins = rng.random(len(movable))
                done = 0
                for label in groups[1]:
                    members = sorted((i for i in movable if labels[i] == label), key=lambda i: keys[i])
                    if members:
                        leaving += members[: math.floor(blurry * len(members) + coins[done])]
                    done += len(members)
            else:
                speeds = [shares[task] / max(1, sum(home[labels[i]] == task for i in movable)) for task in range(tasks)]
                draws = rng.standard_exponential(len(movable))
                arrival = {i: draw / speeds[home[labels[i]]] for i, draw in zip(movable, draws, strict=True)}
                leaving = sorted(movable, key=lambda i: arrival[i])[: int(blurry * len(movable) + rng.random())]
            homes = [home[labels[i]] for i in leaving]
            if reassign == "any":
                targets = rng.permutation(homes).tolist()
            else:
                hops = rng.integers(1, tasks, len(homes)).tolist()
                targets = [(task + hop) % tasks for task, hop in zip(homes, hops, strict=True)]
            for sample, task in zip(leaving, targets, strict=True):
                answer[sample] = int(task)
        sides.append(answer)
    return sides[0], sides[1]
