"""Byte strings in a Flower message: they come back, and they cost the same few objects however many there are."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")

from flwr.app import Array, ArrayRecord, RecordDict

from fcl_bench.flower import records
from fcl_bench.flower.pulls import Pulls


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


def test_a_record_that_is_larger_than_expected_is_refused():
    record = records.content([b"x" * 1000])
    assert records.blobs(record, 1016) == [b"x" * 1000]
    with pytest.raises(ValueError, match="1016 bytes, where at most 1015 are expected"):
        records.blobs(record, 1015)


def test_an_answer_that_does_not_come_to_its_end_holds_up_no_other():
    """Flower waits for minutes for the rest of an answer whose node died while it sent."""
    rest, died = threading.Event(), threading.Event()

    class Grid:
        def pull_messages(self, names):
            assert len(names) == 1
            if names == ["dies"]:
                assert rest.wait(60)
                died.set()
            return [] if names == ["works on"] else list(names)

    names, pulls = ["dies", "works on", "is there"], Pulls(Grid())
    assert list(pulls.answers(names)) == ["is there"]
    assert list(pulls.answers(names[:2])) == []
    rest.set()
    assert died.wait(60)
    assert list(pulls.answers(names[:2])) == ["dies"]
