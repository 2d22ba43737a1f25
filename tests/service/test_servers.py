"""Health, metrics and events show every Redis server that decides; a dead one is down, and the others are shown."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headgate.stores.redis import RedisStore
from tests.service.conftest import Start
from tests.service.test_events import events
from tests.support.clusters import Cluster, Member, Sentinels
from tests.support.servers import KINDS, Server, free_port
from tests.support.service import Service, eventually

pytestmark = pytest.mark.xdist_group("servers")

BUDGET = 10.0  # seconds on a busy machine; the URL's time-out is 20, and a look has 2
BY_SERVER = [
    *("up", "response_seconds", "memory_used_bytes", "memory_max_bytes", "connected_clients", "commands_total"),
    *("expired_keys_total", "evicted_keys_total", "network_input_bytes_total", "network_output_bytes_total"),
    "waiting_calls",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(KINDS[0])
    yield cluster
    cluster.stop()


@pytest.fixture
def sentinels() -> Iterator[Sentinels]:
    sentinels = Sentinels(KINDS[0])
    yield sentinels
    sentinels.stop()


def name(server: Any) -> str:
    return f"127.0.0.1:{server.port}"


def series(service: Service, metric: str) -> dict[str, float]:
    """The values of one metric by server."""
    start = f'rate_limiter_redis_server_{metric}{{server="'
    found = {key.removeprefix(start): value for key, value in service.metrics().items() if key.startswith(start)}
    return {key.removesuffix('"}'): value for key, value in found.items()}


def in_health(service: Service) -> dict[str, Any]:
    """What health shows, by server."""
    servers = service.get("/actuator/health").json["components"]["store"]["servers"]
    return {row["server"]: row for row in servers}


def test_cluster(start: Start, cluster: Cluster) -> None:
    """Each primary has its series, with the connections of all workers; replicas have none."""
    service = start("--store", cluster.patient_url, "--workers", "2", config="min_connections = 2\n")
    primaries = {name(member) for member in cluster.primaries()}
    for i in range(30):
        assert service.check(f"key-{i}").status == 200
    for metric in BY_SERVER:
        assert set(series(service, metric)) == primaries, metric
    assert set(series(service, "up").values()) == {1}
    assert min(series(service, "memory_used_bytes").values()) > 100_000

    def connections() -> list[float]:
        labels = (f'server="{server}",state="idle"' for server in primaries)
        return [service.metrics()[f"rate_limiter_redis_server_connections{{{label}}}"] for label in labels]

    eventually(lambda: min(connections()) >= 4, "two connections of each worker to each server")
    assert service.metrics()["rate_limiter_redis_up"] == 1
    assert service.metrics()['rate_limiter_redis_connections{state="idle"}'] >= sum(connections())
    shown = in_health(service)
    assert set(shown) == primaries
    for row in shown.values():
        assert row["status"] == "UP" and row["memoryUsedBytes"] > 100_000 and row["connectedClients"] > 0
        assert row["evictedKeys"] == 0 and row["connections"]["idle"] >= 4 and row["commandsPerSecond"] >= 0
    for event in events(service):
        if event["store"]["servers"]:  # they are asked in the background
            break
    assert {row["server"] for row in event["store"]["servers"]} == primaries


def test_one_is_frozen(start: Start, cluster: Cluster) -> None:
    """A primary that does not answer is down within the budget of a scrape, and the figures of the others are there."""
    service = start("--store", cluster.patient_url)
    victim = cluster.primary(0)  # the map is asked for this slot
    others = {name(member) for member in cluster.primaries()} - {name(victim)}
    assert set(series(service, "up")) == {name(victim), *others}
    taken: list[float] = []  # seconds of each answer

    def timed(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.monotonic()
        found = ask()
        taken.append(time.monotonic() - began)
        return found

    def is_down_in_health() -> bool:
        return bool(timed(lambda: in_health(service))[name(victim)]["status"] == "DOWN")

    victim.freeze()
    try:
        eventually(lambda: timed(lambda: series(service, "up"))[name(victim)] == 0, "metrics notice it")
        assert {server for server, up in series(service, "up").items() if up} == others
        assert set(series(service, "memory_used_bytes")) == others, "no figures of a server that does not answer"
        eventually(is_down_in_health, "health notices it")
        shown = in_health(service)
        assert {server for server, row in shown.items() if row["status"] == "UP"} == others
        assert shown[name(victim)]["problem"] and max(taken) < BUDGET
    finally:
        victim.thaw()
    eventually(lambda: set(series(service, "up").values()) == {1}, "it answers again")


@pytest.mark.bounded(240)
def test_one_is_replaced(cluster: Cluster) -> None:
    """A replica that took over is shown instead of its primary, though no call has asked for it."""
    victim: Member = cluster.primary(8000)
    successor = cluster.replica(victim)
    store = RedisStore(cluster.patient_url)

    def servers() -> set[str]:
        return {row.server for row in runner.run(store.aservers(20)) if row.up}

    with asyncio.Runner() as runner:
        assert name(victim) in servers() and name(successor) not in servers()
        cluster.kill(victim)
        cluster.wait_for_promotion(8000, victim)
        assert name(successor) in servers() and name(victim) not in servers()
        runner.run(store.aclose())
    cluster.heal()


@pytest.mark.bounded(240)
def test_sentinels(start: Start, sentinels: Sentinels) -> None:
    """Behind Sentinels it is the primary of the moment."""
    service = start("--store", sentinels.patient_url)
    assert series(service, "up") == {name(sentinels.primary): 1}
    sentinels.fail_over()
    sentinels.wait_for_failover()
    eventually(lambda: series(service, "up") == {name(sentinels.replica): 1}, "the new primary")


def test_single_server(start: Start, mortal_server: Server) -> None:
    """The only server has the same series; when it is dead it is down."""
    service = start("--store", mortal_server.patient_url)
    assert series(service, "up") == {name(mortal_server): 1}
    mortal_server.kill()
    eventually(lambda: series(service, "up") == {name(mortal_server): 0}, "it is down")
    assert in_health(service)[name(mortal_server)]["status"] == "DOWN"


def test_where_servers_are_is_for_readers(start: Start, redis_server: Server) -> None:
    """Health is open to every client, and with a read token set it does not tell all of them where the servers are."""
    service = start("--store", redis_server.patient_url, environment={"HEADGATE_READ_TOKEN": "reader"})
    assert "servers" not in service.get("/actuator/health").json["components"]["store"]
    answer = service.get("/actuator/health", headers={"authorization": "Bearer reader"})
    assert len(answer.json["components"]["store"]["servers"]) == 1


def test_where_a_dead_server_is(start: Start) -> None:
    """The error of a server that cannot be reached has its address, which is for readers, too."""
    port = free_port()
    service = start("--store", f"redis://127.0.0.1:{port}/0", environment={"HEADGATE_READ_TOKEN": "reader"})
    answer = service.get("/actuator/health")
    assert answer.status == 503 and str(port).encode() not in answer.body
    answer = service.get("/actuator/health", headers={"authorization": "Bearer reader"})
    assert str(port) in answer.json["components"]["store"]["problems"][0]


def test_without_redis(start: Start) -> None:
    """There are no such series on memory, and a listener's connections are a metric of their own."""
    port = free_port()
    service = start("--resp-port", str(port))
    found = service.metrics()
    assert not any("redis" in key for key in found)
    assert found['rate_limiter_listener_connections{listener="resp"}'] == 0
