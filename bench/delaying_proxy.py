"""A TCP proxy that delays each byte: latency without a limit on bandwidth.

    delaying_proxy.py DELAY_MS LISTEN TARGET      (both host:port; the delay applies each way)

Bytes in flight are held in memory without a limit, so neither bandwidth nor TCP's window is
limited. A real connection of that latency needs larger socket buffers at the broker
(`socket.receive.buffer.bytes`). The proxy shows the cost of waiting for responses and nothing else.
Prints a line when it listens; ends when its standard input ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time

CHUNK_BYTES = 256 << 10


def pump(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Forward one direction until it ends."""
    held: queue.SimpleQueue[tuple[float, memoryview]] = queue.SimpleQueue()
    spare: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def deliver() -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = held.get()
                time.sleep(max(due - time.monotonic(), 0))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
                spare.put(memoryview(data.obj))
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_RD)  # the target accepts no more

    threading.Thread(target=deliver, daemon=True).start()
    count = 1
    while count:
        chunk = memoryview(bytearray(CHUNK_BYTES)) if spare.empty() else spare.get()
        try:
            count = source.recv_into(chunk)
        except OSError:
            count = 0
        held.put((time.monotonic() + delay_s, chunk[:count]))


def serve(listener: socket.socket, target: tuple[str, int], delay_s: float) -> None:
    while True:
        client, _ = listener.accept()
        broker = socket.create_connection(target)
        for one, other in ((client, broker), (broker, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pump, args=(one, other, delay_s), daemon=True).start()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    delay_ms, listen, target = sys.argv[1:]
    listener = socket.create_server(_address(listen))
    arguments = (listener, _address(target), float(delay_ms) / 1000)
    threading.Thread(target=serve, args=arguments, daemon=True).start()
    print("listening", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
