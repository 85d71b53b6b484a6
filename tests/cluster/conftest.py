"""Scripted brokers for the tests of the client; each test module scripts its own `world`."""

import socket
import threading

import pytest

from kit.fakes.scripted_writes import WritableBroker
from kit.fakes.token_endpoint import GOOD, Endpoint


@pytest.fixture
def brokers(world):
    """Two running brokers of a world, by node ID."""
    brokers = {node: WritableBroker(world, node) for node in (1, 2)}
    yield brokers
    for broker in brokers.values():
        broker.close()


@pytest.fixture
def serve():
    """Start an endpoint that responds as given."""
    opened = []

    def serve(*responses, tls=None):
        server = Endpoint(*(responses or (GOOD,)))
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        opened.append((server, thread))
        return server

    yield serve
    for server, thread in opened:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def scripted():
    """Start a listener that carries out a function with each connection; return its port."""
    listeners = []

    def scripted(script):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept():
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=script, args=(peer,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return listener.getsockname()[1]

    yield scripted
    for listener in listeners:
        listener.close()
