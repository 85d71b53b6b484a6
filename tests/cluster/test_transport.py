"""A large response is received whole, in any pieces, and without waiting for more than its end.

Method: a thread on loopback sends what the test says, in pieces, over a plain socket. The reader
waits for large pieces only; it must not block on bytes that have arrived, or on a closed
connection.
"""

import socket
import threading
import time

import pytest

from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.transport import Transport
from logmirror.errors import UnavailableError

RESPONSE = bytes(range(256)) * 4500  # 1,152,000 bytes


@pytest.fixture
def sent_by():
    """Connect to a peer that carries out a function with its socket, then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened = []

    def connect(script):
        def serve():
            peer, _ = listener.accept()
            with peer:
                script(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        transport = Transport(
            "127.0.0.1",
            listener.getsockname()[1],
            connection_settings("127.0.0.1:1"),
            clock=SYSTEM_CLOCK,
            tls=None,
            deadline_ms=SYSTEM_CLOCK.monotonic_ms() + 5000,
        )
        opened.append((transport, thread))
        return transport

    yield connect
    for transport, thread in opened:
        transport.close()
        thread.join()
    listener.close()


def received(transport, size, *, within_ms=10_000):
    view = memoryview(bytearray(size))
    transport.receive(view, 0, size, SYSTEM_CLOCK.monotonic_ms() + within_ms)
    return bytes(view)


@pytest.mark.parametrize("piece_bytes", [1_000, 61_001, 262_143, 262_144, 262_145, len(RESPONSE)])
def test_a_response_in_pieces_of_any_size_arrives_whole(sent_by, piece_bytes):
    def script(peer):
        for at in range(0, len(RESPONSE), piece_bytes):
            peer.sendall(RESPONSE[at : at + piece_bytes])

    assert received(sent_by(script), len(RESPONSE)) == RESPONSE


def test_the_last_bytes_are_not_waited_for_when_nothing_follows_them(sent_by):
    done = threading.Event()

    def script(peer):
        peer.sendall(RESPONSE)
        assert done.wait(10)  # nothing more comes, and the connection stays

    began = time.monotonic()
    assert received(sent_by(script), len(RESPONSE)) == RESPONSE
    done.set()

    assert time.monotonic() - began < 5


def test_a_short_response_after_a_long_one_wakes_the_reader(sent_by):
    done = threading.Event()

    def script(peer):
        peer.sendall(RESPONSE)
        time.sleep(0.2)
        peer.sendall(b"short")
        assert done.wait(10)

    transport = sent_by(script)
    received(transport, len(RESPONSE))
    assert received(transport, 5, within_ms=5_000) == b"short"
    done.set()


def test_a_peer_that_goes_in_the_middle_is_noticed_at_once(sent_by):
    transport = sent_by(lambda peer: peer.sendall(RESPONSE[:500_000]))

    began = time.monotonic()
    with pytest.raises(UnavailableError):
        received(transport, len(RESPONSE))

    assert time.monotonic() - began < 5


def test_a_peer_that_pauses_in_the_middle_is_given_up_at_the_deadline(sent_by):
    done = threading.Event()

    def script(peer):
        peer.sendall(RESPONSE[:300_000])
        assert done.wait(10)

    transport = sent_by(script)
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        received(transport, len(RESPONSE), within_ms=300)
    done.set()

    assert 0.25 < time.monotonic() - began < 5
