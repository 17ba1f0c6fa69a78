"""Slow, plain re-statements of the partitions, written from the papers' text: one loop step a sample or a client.

`dirichlet`, `shards`, `iid` and `equal_sizes` take their random numbers in the order in which the code takes them, so
both must agree on every sample. `all_classes` draws in an order of its own; its distribution must be the same.
"""

from __future__ import annotations

import math

import numpy as np


def iid(labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> list[int]:
    """FedProTIP E.4: "randomly shuffle the dataset indices and divide them into equal-sized subsets"."""
    return [int(card) for card in rng.permutation([sample % clients for sample in range(len(labels))])]


def shards(labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator, per_client: int) -> list[int]:
    """AFL 4.1: "the data is sorted by labels and divided into same-sized shards", s of them to each client."""
    keys = [rng.random() for _ in labels]
    ordered = sorted(range(len(labels)), key=lambda sample: (labels[sample], keys[sample]))
    pieces = clients * per_client
    hands = rng.permutation([piece % clients for piece in range(pieces)])
    owner = [-1] * len(labels)
    for piece in range(pieces):
        begin, end = (math.ceil(len(labels) * cut / pieces) for cut in (piece, piece + 1))
        for sample in ordered[begin:end]:
            owner[sample] = int(hands[piece])
    return owner


def dirichlet(labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> list[int]:
    """One draw per class of the clients' shares; a client with n / K samples or more is passed over."""
    owner = [-1] * len(labels)
    for label in sorted(set(labels.tolist())):
        members = rng.permutation([sample for sample, other in enumerate(labels) if other == label])
        shares = rng.dirichlet([beta] * clients)
        full = [owner.count(client) >= len(labels) / clients for client in range(clients)]
        shares = [0.0 if full[client] else shares[client] for client in range(clients)]
        if sum(shares) == 0:
            shares = [0.0 if full[client] else 1.0 for client in range(clients)]
        last = max(client for client in range(clients) if shares[client] > 0)
        total, running, begin = float(np.sum(shares)), 0.0, 0
        for client in range(clients):
            running += shares[client] / total
            end = len(members) if client >= last else int(running * len(members))
            for sample in members[begin:end]:
                owner[sample] = client
            begin = max(begin, end)
    return owner


def all_classes(labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> list[int]:
    """FedProTIP E.4: "for each class, we sample a probability vector from Dir(alpha) to determine the proportion of
    data assigned to each client. We prevent empty assignments, guaranteeing that each client holds at least one sample
    from every class". Fractions of a sample are rounded at random; who has none takes one that another can spare.
    """
    owner = [-1] * len(labels)
    for label in sorted(set(labels.tolist())):
        members = [int(sample) for sample in rng.permutation(np.flatnonzero(labels == label))]
        shares = rng.dirichlet([beta] * clients)
        hands: list[list[int]] = [[] for _ in range(clients)]
        # A comb of equally spaced teeth, shifted at random, along the line of the shares: a tooth is a sample.
        position, shift = 0.0, rng.random()
        for tooth, sample in enumerate(members):
            position = (tooth + shift) / len(members)
            client, reach = 0, float(shares[0])
            while reach < position and client < clients - 1:
                client += 1
                reach += float(shares[client])
            hands[client].append(sample)
        spare = [sample for hand in hands for sample in hand[1:]]
        for hand in hands:
            if not hand:
                sample = spare.pop(int(rng.integers(len(spare))))
                next(other for other in hands if sample in other).remove(sample)
                hand.append(sample)
        for client, hand in enumerate(hands):
            for sample in hand:
                owner[sample] = client
    return owner


def equal_sizes(labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> list[int]:
    """AFCL F.1: "the data allocated to each client has an equal number of samples and follows the Dirichlet
    distribution". Place after place draws a class from its client's distribution over the classes that are there;
    who comes too late draws again when everybody has drawn.
    """
    classes = sorted(set(labels.tolist()))
    stock = {label: int((labels == label).sum()) for label in classes}
    whole, rest = divmod(len(labels), clients)
    sizes = [whole + (1 if card < rest else 0) for card in rng.permutation(clients)]
    gammas = rng.standard_gamma(beta + 1, (clients, len(classes)))
    exponentials = rng.standard_exponential((clients, len(classes)))
    logs = np.log(gammas) - exponentials / beta
    places = [int(client) for client in rng.permutation([k for k in range(clients) for _ in range(sizes[k])])]
    given: list[list[int]] = [[0] * clients for _ in classes]
    while places:
        there = [c for c, label in enumerate(classes) if stock[label] > 0]
        waiting = []
        for client in places:
            most = max(logs[client][c] for c in there)
            weights = [math.exp(logs[client][c] - most) for c in there]
            target, running, chosen = rng.random() * sum(weights), 0.0, there[-1]
            for c, weight in zip(there, weights, strict=True):
                running += weight
                if target < running:
                    chosen = c
                    break
            if stock[classes[chosen]] > 0:
                stock[classes[chosen]] -= 1
                given[chosen][client] += 1
            else:
                waiting.append(client)
        places = waiting
    return _handed_out(labels, classes, given, rng)


def power_law(labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> list[int]:
    """FedSpace's public code: sizes by a power law of exponent 3; client after client a Dirichlet law over the classes
    that are left, rounded, and at most what is there; what nobody wanted fills the clients that lack samples.
    """
    classes = sorted(set(labels.tolist()))
    stock = [int((labels == label).sum()) for label in classes]
    shares = rng.power(3.0, clients)
    sizes, running, before = [], 0.0, 0
    for share in shares:
        running += share
        sizes.append(round(float(running / shares.sum() * len(labels))) - before)
        before += sizes[-1]
    gammas = rng.standard_gamma(beta + 1, (clients, len(classes)))
    exponentials = rng.standard_exponential((clients, len(classes)))
    logs = np.log(gammas) - exponentials / beta
    given: list[list[int]] = [[0] * clients for _ in classes]
    for client in range(clients):
        there = [c for c in range(len(classes)) if stock[c] > 0]
        if sizes[client] == 0:
            continue
        most = max(logs[client][c] for c in there)
        weights = {c: math.exp(logs[client][c] - most) for c in there}
        total, room = sum(weights.values()), sizes[client]
        for c in there:
            taken = min(round(weights[c] / total * sizes[client]), stock[c], room)
            given[c][client] = taken
            stock[c] -= taken
            room -= taken
    for client in range(clients):
        lacks = sizes[client] - sum(own[client] for own in given)
        for c in range(len(classes)):
            taken = min(lacks, stock[c])
            given[c][client] += taken
            stock[c] -= taken
            lacks -= taken
    return _handed_out(labels, classes, given, rng)


def _handed_out(labels: np.ndarray, classes: list, given: list[list[int]], rng: np.random.Generator) -> list[int]:
    """Who owns each sample if client k gets given[c][k] samples of class c, in a random order."""
    clients = len(given[0])
    keys = [rng.random() for _ in labels]
    owner = [-1] * len(labels)
    for c, label in enumerate(classes):
        members = sorted(np.flatnonzero(labels == label), key=lambda sample: keys[sample])
        hands = [client for client in range(clients) for _ in range(given[c][client])]
        for sample, client in zip(members, hands, strict=True):
            owner[sample] = client
    return owner
