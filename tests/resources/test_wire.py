import io
import os
import threading
import time
from collections.abc import Iterator

import pytest

from resources.wire import PeerGone, pack, read_message, receive, send


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue  # closed by the test


def soon() -> float:
    return time.monotonic() + 300


@pytest.mark.parametrize("text", ["", "plain", "\u2028 é 🎲", "lone \ud800 surrogate", "\x00", "x" * 3_000_000])
def test_messages_arrive_whole(pipe: tuple[int, int], text: str):
    message = {"text": text, "values": [1, 0.1, None]}
    writer = threading.Thread(target=send, args=(pipe[1], message, soon()))
    writer.start()
    assert receive(pipe[0], soon()) == message
    writer.join()
    assert read_message(io.BytesIO(pack(message))) == message


def test_the_end_of_a_stream_is_no_message():
    assert read_message(io.BytesIO(b"")) is None
    assert read_message(io.BytesIO(pack({"a": 1})[:-1])) is None


def test_waits_are_bounded(pipe: tuple[int, int]):
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(pipe[0], started_s + 0.05)
    os.write(pipe[1], pack({"a": 1})[:-1])
    with pytest.raises(TimeoutError):
        receive(pipe[0], time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        send(pipe[1], {"a": "x" * 1_000_000}, time.monotonic() + 0.05)
    assert time.monotonic() - started_s < 60


def test_a_closed_end_is_noticed(pipe: tuple[int, int]):
    os.close(pipe[0])
    with pytest.raises(PeerGone):
        send(pipe[1], {"a": 1}, soon())


def test_a_closed_writer_is_noticed(pipe: tuple[int, int]):
    os.write(pipe[1], pack({"a": 1})[:-1])
    os.close(pipe[1])
    with pytest.raises(PeerGone):
        receive(pipe[0], soon())


def test_noise_is_not_taken_for_a_message(pipe: tuple[int, int]):
    os.write(pipe[1], b"printed text")
    with pytest.raises(PeerGone):
        receive(pipe[0], soon())
