"""Ask a service over some connections for some seconds, as wrk would: python -m benchmarks.http_client PORT PATH S N.

A path that ends in = gets another key each time. Prints a line: RESULT microseconds requests refused p99-microseconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from itertools import count


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, requests: Iterator[bytes], statuses: list[bytes], times: list[float]) -> None:
        self._requests = requests
        self._statuses = statuses
        self._times = times
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._at = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(body) < length:
            return
        self._times.append(time.perf_counter() - self._at)
        self._statuses.append(head[9:12])
        self._buffer = body[length:]
        self._ask()


async def main(port: int, path: str, seconds: float, connections: int) -> None:
    statuses: list[bytes] = []
    times: list[float] = []
    keys = (n % 10_000 for n in count())
    form = f"GET {path}%s HTTP/1.1\r\nHost: x\r\n\r\n"
    requests = ((form % (key if path.endswith("=") else "")).encode() for key in keys)
    began = time.perf_counter()
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: Connection(requests, statuses, times), "127.0.0.1", port)
        for _ in range(connections)
    ]
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - began
    for transport, _ in made:
        transport.close()
    p99 = sorted(times)[int(0.99 * (len(times) - 1))]
    refused = len(statuses) - statuses.count(b"200")
    print(f"RESULT {elapsed * 1e6:.0f} {len(statuses)} {refused} {p99 * 1e6:.0f}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
