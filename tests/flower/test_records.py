"""Byte strings in a Flower message: they come back, and they cost the same few objects however many there are."""

from __future__ import annotations

import threading
from hashlib import blake2b
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")

from flwr.app import Array, ArrayRecord, RecordDict

from fcl_bench.flower import frames, records
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
    joined = blake2b(joined, digest_size=16).digest() + joined
    record = RecordDict({"blobs": ArrayRecord({"blobs": Array("uint8", (len(joined),), "fcl-bench", joined)})})
    with pytest.raises(ValueError, match="byte strings"):
        records.blobs(record)
    with pytest.raises(ValueError, match="byte strings"):
        records.blobs(RecordDict({}))


def test_a_record_that_is_larger_than_expected_is_refused():
    record = records.content([b"x" * 1000])
    assert records.blobs(record, 1032) == [b"x" * 1000]
    with pytest.raises(records.TooLong, match="1032 bytes, where at most 1031 are expected"):
        records.blobs(record, 1031)


def test_a_record_that_lost_or_changed_a_byte_is_refused():
    joined = records.content([b"upload", b"another"]).array_records["blobs"]["blobs"].data
    for place in range(len(joined)):
        for harmed in (joined[:place] + bytes([joined[place] ^ 4]) + joined[place + 1 :], joined[:place]):
            record = RecordDict({"blobs": ArrayRecord({"blobs": Array("uint8", (len(harmed),), "fcl-bench", harmed)})})
            with pytest.raises(ValueError, match="damaged|byte strings") as error:
                records.blobs(record)
            # The node is asked again: it is not what it sends that no server takes.
            assert not isinstance(error.value, records.TooLong)


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


def test_a_request_that_was_changed_on_its_way_reaches_no_worker(tmp_path):
    """The ClientApp ends with an error, which the server gets, who asks again."""
    client = pytest.importorskip("fcl_bench.flower.bundle.fcl_relay_client")
    sent = records.content([b"a broadcast"])
    array = sent.array_records["blobs"]["blobs"]
    array.data = array.data[:-1] + b"!"
    reached = tmp_path / "worker"
    with frames.listener(reached) as listener:
        context = SimpleNamespace(node_config={"socket": str(reached)})
        with pytest.raises(ValueError, match="damaged"):
            client.relay(SimpleNamespace(content=sent), context)
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()
