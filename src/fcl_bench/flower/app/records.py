"""Messages of fcl-bench in Flower's records: one array per tensor, numbers beside them, and what a turn has to know.

Flower's mods change the one `ArrayRecord` of a reply, and compare its names with those of the request. So a broadcast
model travels as arrays, in the order of its names, and what else a broadcast holds beside a model as bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fcl_bench.engine.blob import packed, unpacked
from fcl_bench.protocol.message import Message

#: The names of the records, as Flower's own strategies have them.
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
#: Stands for no text, since `ConfigRecord.count_bytes` takes no empty one.
NONE = "none"
#: In a request's settings, the tensors of the broadcast that are no part of a model, as bytes.
_BESIDE = "beside"
#: The samples that an upload is about, if the client half says it.
_SAMPLES = "samples"


def arrays(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Tensors as arrays of the same names, ascending."""
    return ArrayRecord({name: Array(tensors[name].detach().cpu().numpy()) for name in sorted(tensors)})


def tensors(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """What `arrays` was given. Raises a `ValueError` for arrays that are no tensors."""
    try:
        return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
    except (TypeError, ValueError, MemoryError, EOFError) as error:
        raise ValueError(f"an array is no tensor: {error}") from error


def request(broadcast: Message, answered: Collection[str], settings: Mapping[str, Any]) -> RecordDict:
    """A broadcast, and what its receiver has to know.

    Args:
        answered: the names of the tensors that a reply to it has.
        settings: numbers, texts and lists of them.
    """
    is_model = bool(answered) and set(answered) <= broadcast.keys()
    beside = {name: own for name, own in broadcast.items() if is_model and name not in answered}
    sent = {name: own for name, own in broadcast.items() if name not in beside}
    about = {"task": broadcast.task, "round": broadcast.round, "stage": broadcast.stage}
    config = ConfigRecord({**settings, **about, _BESIDE: packed(Message(beside))})
    return RecordDict({ARRAYS: arrays(sent), CONFIG: config})


def broadcast_of(content: RecordDict) -> Message:
    """The broadcast in a request."""
    config: Any = content.config_records[CONFIG]
    beside, _ = unpacked(config[_BESIDE])
    whole = {**tensors(content.array_records[ARRAYS]), **beside}
    return Message(whole, config["stage"], task=config["task"], round=config["round"])


def reply(upload: Message, metrics: Mapping[str, int | float]) -> RecordDict:
    """An upload, and numbers beside it."""
    about = {} if upload.samples is None else {_SAMPLES: upload.samples}
    return RecordDict({ARRAYS: arrays(upload.tensors), METRICS: MetricRecord({**metrics, **about})})


def upload_of(content: RecordDict, broadcast: Message, most: int) -> tuple[Message, dict[str, Any]]:
    """The upload in a reply to a broadcast, and the numbers beside it.

    Args:
        most: bytes that its arrays may have.

    Raises:
        ValueError: the reply has another form, or is larger.
    """
    if content.array_records.keys() != {ARRAYS} or content.metric_records.keys() != {METRICS}:
        raise ValueError(f"the reply has the records {', '.join(content) or 'none'}, not {ARRAYS} and {METRICS}")
    record, metrics = content.array_records[ARRAYS], dict(content.metric_records[METRICS])
    size = sum(len(array.data) for array in record.values())
    if size > most:
        raise ValueError(f"the reply has {size} bytes, where at most {most} are expected")
    samples: Any = metrics.pop(_SAMPLES, None)
    upload = Message(tensors(record), broadcast.stage, samples, task=broadcast.task, round=broadcast.round)
    return upload, metrics
