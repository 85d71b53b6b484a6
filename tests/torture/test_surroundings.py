"""What surrounds the mirrors of the torture does what the trials need.

Method: the product's S3 store against the S3 server, plain sockets against the proxy, an embedded
broker for the producer.
"""

import contextlib
import socket
import threading

import pytest

from logmirror.cluster.client import LATEST, ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.locations import S3Identity, S3Location
from logmirror.model import TopicPartition
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.s3 import S3Store
from logmirror.torture.feeder import Feeder, end_of, number_of, read_topic
from logmirror.torture.processes import Broker, wait
from logmirror.torture.proxy import Proxy
from logmirror.torture.s3_server import BUCKET, HOST, S3Server


@pytest.fixture
def server():
    with S3Server() as started:
        yield started


def store_at(port):
    who = S3Identity(access_key_id="a", secret_access_key="b")
    return S3Store(
        S3Location(
            bucket=BUCKET,
            prefix="p",
            region="us-east-1",
            endpoint=f"http://{HOST}:{port}",
            path_style=True,
            checksums="when_required",
            read=who,
            write=who,
        )
    )


def test_objects_are_stored_and_never_overwritten(server):
    store = store_at(server.port)
    store.create("f/a & b", b"one")
    with pytest.raises(AlreadyExistsError):
        store.create("f/a & b", b"two")
    staged = store.stage("x")
    staged.write(b"staged")
    store.publish(staged.finish("f/c", travels=True), "f/c")
    assert list(store.names("f")) == ["a & b", "c"]
    assert store.sizes("f") == {"a & b": 3, "c": 6}
    assert store.read("f/c") == b"staged"
    with store.open("f/c") as file:
        file.seek(2)
        assert file.read(3) == b"age"
    assert store.sweep(["f"], lambda _: True) == 0
    store.delete("f/c")
    assert server.names("p/f") == ["a & b"]
    store.prove_create_only()


@pytest.mark.parametrize("body", [b"", b"on"])
def test_an_incomplete_request_body_is_not_stored(server, body):
    with socket.create_connection((HOST, server.port)) as sender:
        head = f"PUT /{BUCKET}/p/f/a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 3\r\n\r\n"
        sender.sendall(head.encode() + body)
        sender.shutdown(socket.SHUT_WR)
        assert sender.recv(1) == b""
    assert server.names("p/f") == []


@pytest.mark.parametrize("fault", ["refused", "lost-answer", "late"])
def test_the_store_completes_a_write_despite_a_fault(server, fault):
    server.faults.append(fault)
    store_at(server.port).create("f/a", b"one")
    assert not server.faults
    assert server.read("p/f/a") == b"one"


def echo(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)


def test_the_proxy_forwards_blocks_and_closes_connections():
    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with Proxy((HOST, 0), listener.getsockname()) as proxy:
            address = (HOST, proxy.port)
            with socket.create_connection(address, timeout=10) as client:
                client.sendall(b"hello")
                assert client.recv(100) == b"hello"
                proxy.is_silent = True
                client.sendall(b"again")
                client.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    client.recv(100)
                proxy.is_silent = False
                client.settimeout(10)
                assert client.recv(100) == b"again"
                proxy.cut()
                with contextlib.suppress(ConnectionError):
                    assert client.recv(100) == b""


def assert_all_is_known(source, feeder):
    """No transaction is open, and a consumer sees what the producer calls acknowledged."""
    for number in range(2):
        rows = read_topic(source.address, "orders", number)
        assert {row.offset: row for row in rows} == feeder.acknowledged[number]
        where = TopicPartition("orders", number)
        with ClusterClient(connection_settings(source.address)) as client:
            ends = client.list_offsets([where], LATEST, read_committed=False)
        assert end_of(source.address, "orders", number) == ends[where]
        known = feeder.acknowledged[number] | feeder.aborted[number]
        assert max(known) < ends[where]
        numbers = [number_of(row) for row in known.values()]
        assert min(numbers) > 0
        assert len(set(numbers)) == len(numbers)


@pytest.mark.timeout(600)
def test_the_producer_knows_which_records_are_committed_and_which_aborted(tmp_path):
    with Broker(tmp_path / "source", HOST) as source:
        with Feeder(source.address, "orders", 2, seed=3) as feeder:
            feeder.transacts = True
            assert wait(lambda: feeder.aborted[0] and feeder.acknowledged[1], 60_000)
            feeder.pause()
            written = feeder.count
            assert_all_is_known(source, feeder)
            feeder.resume()
            assert wait(lambda: feeder.count > written, 60_000)
        assert_all_is_known(source, feeder)
