"""A Redis Cluster of the benchmark's own: so many primaries on the loopback, no replicas, gone when it ends."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.server import START_SECONDS, binary, wait_until_up

SLOTS = 16384
BUS = 10_000  # the port of the Cluster bus is so much higher
NOT_CHECKS = {"auth", "client", "cluster", "command", "config", "dbsize", "flushall", "hello", "info", "ping", "script"}


@dataclass(frozen=True, slots=True)
class Node:
    port: int
    client: Any  # redis-py types every reply as either kind of client's

    def cpu_seconds(self) -> float:
        """Processor time of the server since it was started, by its own account."""
        info = self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def commands(self) -> int:
        """How many commands have run since the statistics were reset, those inside of scripts included; not ours."""
        stats = self.client.info("commandstats")
        names = {name: name.removeprefix("cmdstat_").partition("|")[0] for name in stats}
        return sum(int(stats[name]["calls"]) for name, command in names.items() if command not in NOT_CHECKS)

    def reads(self) -> int:
        """How often the server has read from a socket: the round trips, whatever they carried."""
        return int(self.client.info("stats")["total_reads_processed"])

    def keys(self) -> int:
        return int(self.client.dbsize())


def cluster_port() -> int:
    """A free port whose bus port is free too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + BUS))
            except (OSError, OverflowError):
                continue
            return port


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {START_SECONDS:.0f} s: {what}")
        time.sleep(0.05)


@contextmanager
def running(kind: str, count: int) -> Iterator[list[Node]]:
    """Start *count* primaries, deal the slots out evenly, and wait until every node says that the Cluster is whole."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(_started(kind)) for _ in range(count)]
        for epoch, node in enumerate(nodes, start=1):
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", epoch)  # else they argue about it, slowly
            slots = range((epoch - 1) * SLOTS // count, epoch * SLOTS // count)
            node.client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        for node in nodes[1:]:
            nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        wait_until(lambda: all(_is_whole(node, count) for node in nodes), "the Cluster is whole")
        yield nodes


def _is_whole(node: Node, count: int) -> bool:
    info = str(node.client.execute_command("CLUSTER", "INFO")).split()
    return {"cluster_state:ok", f"cluster_known_nodes:{count}"} <= set(info)


@contextmanager
def _started(kind: str) -> Iterator[Node]:
    port = cluster_port()
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        options = {"port": str(port), "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "no"}
        options |= {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf"}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        process = subprocess.Popen([binary(kind), *words], stdout=subprocess.DEVNULL)
        try:
            with redis.Redis(port=port, decode_responses=True) as client:
                wait_until_up(client, process)
                yield Node(port, client)
        finally:
            process.terminate()
            process.wait()
