"""Byte strings in a Flower message: they come back, and they cost the same few objects however many there are."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")

from flwr.app import Array, ArrayRecord, RecordDict

from fcl_bench.flower import records
from fcl_bench.flower.patience import FIRST_WAIT, retry_soon


@pytest.mark.parametrize("blobs", [[], [b""], [b"one"], [b"", b"two", b"\x00" * 9, b""]])
def test_byte_strings_come_back(blobs):
    assert records.blobs(records.content(blobs)) == blobs


def objects(record: RecordDict) -> int:
    """How many objects Flower sends for a record, each in a request of its own."""
    return 1 + sum(map(objects, (record.children or {}).values()))


def test_the_replies_of_ten_clients_take_as_many_requests_as_that_of_one():
    found = [objects(records.content([bytes([client]) * 1000 for client in range(count)])) for count in (1, 10)]
    assert found[0] == found[1]


@pytest.mark.parametrize("joined", [b"", b"\x01", b"\x01" + b"\x00" * 7, b"\xff" * 8, b"\x00" * 9])
def test_a_record_of_another_form_is_refused(joined):
    record = RecordDict({"blobs": ArrayRecord({"blobs": Array("uint8", (len(joined),), "fcl-bench", joined)})})
    with pytest.raises(ValueError, match="byte strings"):
        records.blobs(record)
    with pytest.raises(ValueError, match="byte strings"):
        records.blobs(RecordDict({}))


def test_a_reply_that_is_still_on_its_way_is_asked_for_again_soon(monkeypatch, capsys):
    """With the installed Flower: its default, which no setting changes, is where `retry_soon` looks for it."""
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects

    for pulls in (pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        monkeypatch.setattr(pulls, "__kwdefaults__", dict(pulls.__kwdefaults__))
        assert pulls.__kwdefaults__["initial_backoff"] > FIRST_WAIT
    retry_soon()
    retry_soon()
    assert not capsys.readouterr().err
    for pulls in (pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        assert pulls.__kwdefaults__["initial_backoff"] == FIRST_WAIT
    asked = []

    def pull(name: str) -> bytes:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise ObjectUnavailableError(name)
        return b"it"

    assert pull_objects(["a"], pull) == {"a": b"it"}
    assert asked[1] - asked[0] < 0.7
