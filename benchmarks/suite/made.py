"""Made-up features, shards, problems and uploads of any size."""

from __future__ import annotations

import dataclasses

import torch

from fcl_bench.engine.codec import decoded, encoded
from fcl_bench.linalg.spectral import Spectrum
from fcl_bench.methods.closed_form.algebra.random_features import RandomFeatures
from fcl_bench.methods.closed_form.base import projection_seed
from fcl_bench.protocol.context import ClientData, Context, Task, WireFormat
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Method

CPU = torch.device("cpu")


def context(d: int, dtype: torch.dtype, device: torch.device = CPU) -> Context:
    """What both halves know; uploads travel in float32, as by default."""
    return Context(inputs=d, seed=0, dtype=dtype, device=device, wire=WireFormat(torch.float32))


def context_projection(known: Context, M: int) -> torch.Tensor:
    """P (d, M), the one that all clients of the problem draw."""
    projection = RandomFeatures(projection_seed(known), known.inputs, M, known.dtype, known.device).projection
    assert projection is not None
    return projection


def labels(n: int, C: int, device: torch.device = CPU) -> torch.Tensor:
    """(n,) of the classes in turn."""
    return torch.arange(n, device=device) % C


def features(n: int, d: int, C: int, dtype: torch.dtype, device: torch.device = CPU, seed: int = 0) -> torch.Tensor:
    """(n, d) around class centres, with variances that fall off as a backbone's do (as 1 / i); the classes in turn."""
    rng = torch.Generator().manual_seed(1 + seed)
    scales = torch.arange(1, d + 1, dtype=torch.float64).rsqrt()
    centres = torch.randn(C, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Z = (centres[labels(n, C)] + torch.randn(n, d, generator=rng, dtype=torch.float64)) * scales
    return Z.to(device, dtype)


def random_features(
    n: int, d: int, M: int, dtype: torch.dtype, device: torch.device = CPU, seed: int = 0
) -> torch.Tensor:
    """H (n, M) of made-up features of ten classes."""
    return RandomFeatures(0, d, M, dtype, device).map(features(n, d, 10, dtype, device, seed))


def client_data(n: int, d: int, C: int, dtype: torch.dtype, device: torch.device = CPU, client: int = 0) -> ClientData:
    """One client's samples of the first task, all labelled."""
    Z = features(n, d, C, dtype, device, seed=client)
    return ClientData(client, 0, Z, labels(n, C, device), Z[:0])


def task(C: int, index: int = 0) -> Task:
    """A task of C new classes, after `index` others like it."""
    return Task(index, range(index * C, (index + 1) * C), (index + 1) * C)


def upload(client: Client, one: ClientData, broadcast: Message) -> Message:
    """What a client sends in its first turn, as the engine passes it on."""
    return dataclasses.replace(client.update(one, broadcast, {})[0], stage=broadcast.stage)


def uploads(method: Method, known: Context, shards: list[ClientData], one: Task) -> list[Message]:
    """What the clients send in the only round of a task, as the server gets it from the wire."""
    server, client = method.server(known), method.client(known)
    server.start_task(one)
    sent = (encoded(upload(client, each, server.broadcast(one, 0)), known.wire) for each in shards)
    return [decoded(message, known.dtype, known.device) for message in sent]


def spectra(count: int, M: int, r: int, dtype: torch.dtype, device: torch.device = CPU) -> list[Spectrum]:
    """Sketches of rank r, singular values falling off as 1 / sqrt(i), directions at random."""
    sketches = []
    for seed in range(count):
        rng = torch.Generator().manual_seed(seed)
        V, _ = torch.linalg.qr(torch.randn(M, r, generator=rng, dtype=torch.float64))
        sigma = 100 * torch.arange(1, r + 1, dtype=torch.float64).rsqrt()
        sketches.append(Spectrum(V.to(device, dtype), sigma.to(device, dtype)))
    return sketches
