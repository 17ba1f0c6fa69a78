"""Uploads that differ from what a server declares are refused, field by field, and those that don't are absorbed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import Codec
from fcl_bench.engine.exchange import Arrival
from fcl_bench.engine.validation import BadUpload, validate_upload
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import Field, Schema, Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method
from fcl_bench.protocol.task import Task
from fcl_bench.protocol.wire import WireFormat
from tests.conformance.cases import EVERY, context_for, method_of
from tests.methods.harness import on_wire, take_in, turn
from tests.methods.training_harness import image_shard, image_tasks, images_stream


def changed(name: str, sent: torch.Tensor, declared: Field) -> Iterator[tuple[str, torch.Tensor]]:
    """What is wrong, and a field that is wrong in this way alone."""
    yield "more sides", sent.unsqueeze(0)
    if not sent.numel():
        return
    sent = sent.contiguous()
    value = sent.clone()
    if sent.is_floating_point():
        for number in (float("nan"), float("inf")):
            value.view(-1)[0] = number
            yield f"{number}", value.clone()
        yield "whole numbers", torch.zeros(sent.shape, dtype=torch.int64)
    else:
        yield "real numbers", sent.double()
    if declared.least is not None and sent.is_floating_point():
        value.view(-1)[0] = 2 * declared.least - 1
        yield "below the least", value.clone()
    if declared.kind == "whole":
        value.view(-1)[0] = -1
        yield "a negative number", value.clone()
    if declared.form == "gram" and len(sent) > 1:
        value = sent.clone()
        value[0, 1] += 1 + value.abs().max()
        yield "not symmetric", value
        value = sent.clone()
        value[0, 0] = -1 - value.abs().max()
        yield "not semidefinite", value
    if declared.form == "orthonormal":
        yield "longer columns", 2 * sent
    if declared.form == "descending" and len(sent) > 1 and float(sent[0]) > float(sent[-1]):
        yield "ascending", sent.flip(0)


def wrong(upload: Message, declared: Schema) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """What is wrong with an upload, and its tensors."""
    yield "an unknown field", {**upload.tensors, "unknown": torch.zeros(1, dtype=torch.float64)}
    # A network has many weights that are declared alike.
    of_kind = {(replace(declared[name], shape=()), sent.ndim): name for name, sent in upload.items()}
    for name in of_kind.values():
        sent = upload[name]
        if not declared[name].optional:
            yield f"no {name}", {own: value for own, value in upload.items() if own != name}
        for what, value in changed(name, sent, declared[name]):
            yield f"{name}: {what}", {**upload.tensors, name: value}


def try_stage(method: Method, context: Context, task: Task, round_: int, server: Any, upload: Message) -> int:
    """Have each wrong upload refused. Returns how many there were."""
    declared, codec = server.schema(task, upload.stage), Codec(Uploads.of(method, context), None)
    validate_upload(Arrival(0, upload), declared, codec, server)
    taken = []
    count = 0
    for what, tensors in wrong(upload, declared):
        count += 1
        try:
            validate_upload(Arrival(0, replace(upload, tensors=tensors)), declared, codec, server)
        except BadUpload:
            continue
        taken.append(what)
    assert not taken, f"{method.name}, {upload.stage}: taken in"
    return count


@pytest.mark.parametrize("name", EVERY)
def test_wrong_uploads_are_refused_in_every_stage(name):
    method = method_of(name)
    images = method.trains_network
    context = replace(context_for(method), clients=2, wire=WireFormat(torch.float64))
    rng = np.random.default_rng(0)
    sizes = [[9, 7]]
    if images:
        tasks = image_tasks(rng, [3], sizes)
    else:
        labels = [torch.arange(count) % 3 for count in sizes[0]]
        # Not negative, since FedFecAM takes roots.
        tasks = [[(torch.from_numpy(rng.standard_normal((len(own), context.inputs))).abs(), own) for own in labels]]
    [task] = images_stream(tasks)
    server, client, states = method.server(context), method.client(context), {}
    server.start_task(task)
    stages: dict[str, int] = {}
    for round_ in range(server.rounds(task)):
        present = server.participants(task, round_, [0, 1])
        broadcast = server.broadcast(task, round_)
        for k in present:
            upload = turn(client, image_shard(k, 0, *tasks[0][k]), broadcast, states, round_)
            if upload.stage not in stages:
                stages[upload.stage] = try_stage(method, context, task, round_, server, upload)
            take_in(server, k, on_wire(upload, method, context), task, round_)
        server.finish_round()
    # A stage may have no field: an unknown one is then all that can be wrong.
    assert min(stages.values()) >= 1
    assert max(stages.values()) > 5
