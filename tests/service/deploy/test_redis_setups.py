"""The Redis of compose and Kubernetes: its files are started with a real server, as far as that goes on one machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml  # type: ignore[import-untyped]  # it ships no types

from headgate import Limiter
from tests.service.deploy.processes import END_WITH_PARENT
from tests.service.deploy.tools import HOUSE
from tests.support.clusters import ONCE, wait_until
from tests.support.servers import KINDS, binary, quiet_port

pytestmark = pytest.mark.server

DEPLOY = HOUSE / "deploy"
START = (DEPLOY / "redis" / "start.sh").read_text()
CONF = (DEPLOY / "redis" / "redis.conf").read_text()
MANIFESTS = ("redis.yaml", "redis-sentinel.yaml", "redis-cluster.yaml")
PASSWORD = "letters4digits"


def config_map(name: str) -> dict[str, str]:
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))
    data: dict[str, str] = next(one["data"] for one in found if one["kind"] == "ConfigMap")
    return data


class Started:
    """A server that start.sh has started in a folder, which stands for / of its container."""

    def __init__(self, folder: Path, conf: str, *words: str, **environment: str) -> None:
        self.port = quiet_port()
        for name in ("bin", "data", "tmp"):
            (folder / name).mkdir(parents=True)
        for name in ("redis-server", "redis-sentinel"):
            (folder / "bin" / name).symlink_to(binary(next(iter(KINDS))))
        primary = environment.pop("PORT", "6379")
        (folder / "redis.conf").write_text(self._moved(f"{conf}\nport {self.port}\nbind 127.0.0.1\n", folder))
        script = self._moved(START, folder).replace(" 6379", f" {primary}")
        script = script.replace("port 26379", f"port {self.port}\nbind 127.0.0.1")
        (folder / "start.sh").write_text(script)
        told = {"PATH": f"{folder}/bin:/usr/bin:/bin", "REDIS_PASSWORD": PASSWORD, **environment}
        self._log = (folder / "log").open("wb")
        start = ["/bin/sh", str(folder / "start.sh"), *words]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *start],
            env=told,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self.client: Any = redis.Redis(
            port=self.port,
            password=None if words else PASSWORD,
            decode_responses=True,
            socket_timeout=20,
            retry=ONCE,
        )

    @staticmethod
    def _moved(text: str, folder: Path) -> str:
        text = text.replace("/tmp/own.conf", f"{folder}/tmp/own.conf").replace("/data", f"{folder}/data")
        return text.replace("/etc/redis/redis.conf", f"{folder}/redis.conf")

    def stop(self) -> None:
        self.client.close()
        self.process.kill()  # a replica that writes its first append-only file does not stop when told to
        self.process.wait(30)
        self._log.close()


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begin(servers: ExitStack, started: Started) -> Started:
    servers.callback(started.stop)
    wait_until(started.client.ping, "the server answers")
    return started


def test_manifests_have_the_same_files() -> None:
    """The ConfigMaps carry the script and the settings of deploy/redis."""
    for name in MANIFESTS:
        data = config_map(name)
        assert data["start.sh"] == START and data["redis.conf"].startswith(CONF), name


@pytest.mark.parametrize("name", MANIFESTS)
def test_scripts_parse(name: str) -> None:
    for file, text in config_map(name).items():
        if file.endswith(".sh"):
            ran = subprocess.run(["/bin/sh", "-n"], input=text, capture_output=True, text=True, timeout=20, check=False)
            assert ran.returncode == 0, (file, ran.stderr)


@pytest.mark.parametrize("name", MANIFESTS)
def test_password_and_persistence(servers: ExitStack, name: str, tmp_path: Path) -> None:
    """Redis starts with these settings, asks for the password, keeps what it has, and evicts nothing."""
    started = begin(servers, Started(tmp_path / "a", config_map(name)["redis.conf"]))
    settings = {"appendonly": "yes", "maxmemory-policy": "noeviction", "maxmemory": str(256 << 20)}
    assert {key: started.client.config_get(key)[key] for key in settings} == settings
    with pytest.raises(redis.AuthenticationError), redis.Redis(port=started.port) as anonymous:
        anonymous.ping()
    assert PASSWORD not in Path(f"/proc/{started.process.pid}/cmdline").read_text() or sys.platform != "linux"


def test_replica_and_sentinel(servers: ExitStack, tmp_path: Path) -> None:
    """A replica follows the primary, a Sentinel finds both, and a limiter finds the primary by the Sentinel."""
    here, there = "127.0.0.1", "localhost"
    primary = begin(servers, Started(tmp_path / "a", CONF, ANNOUNCE=here, REPLICA_OF=here))
    port = str(primary.port)
    replica = begin(servers, Started(tmp_path / "b", CONF, ANNOUNCE=there, REPLICA_OF=here, PORT=port))
    sentinel = begin(servers, Started(tmp_path / "c", "", "sentinel", ANNOUNCE=here, REPLICA_OF=here, PORT=port))
    wait_until(lambda: replica.client.info("replication")["master_link_status"] == "up", "the replica follows")
    ask = sentinel.client.execute_command
    wait_until(lambda: len(ask("SENTINEL", "REPLICAS", "headgate")) == 1, "the Sentinel has found the replica", 60)
    url = f"redis+sentinel://:{PASSWORD}@127.0.0.1:{sentinel.port}/headgate/0?timeout=20"
    with Limiter("5/hour", store=url, on_store_error="raise") as limiter:
        assert limiter.try_acquire("a").remaining == 4
    assert primary.client.dbsize() == 1
