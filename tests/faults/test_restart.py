"""A server with an append-only file keeps the limits through a crash, and every server keeps them for applications."""

import pytest

from headgate import Limiter
from tests.support.clusters import Node
from tests.support.load import Load
from tests.support.quotas import ALGORITHMS

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults")]

PATIENT = "?timeout=20&connect_timeout=20"


def test_crash(durable_node: Node) -> None:
    """State survives a crash of a server that writes an append-only file."""
    for algorithm in ALGORITHMS:
        with Limiter("5/30d", algorithm=algorithm, store=durable_node.bare_url + PATIENT) as limiter:
            limiter.try_acquire("k", permits=3)
    durable_node.kill()
    durable_node.restart()
    for algorithm in ALGORITHMS:
        with Limiter("5/30d", algorithm=algorithm, store=durable_node.bare_url + PATIENT) as restarted:
            decision = restarted.try_acquire("k", permits=3)
            assert not decision.allowed and not decision.degraded, algorithm
            assert restarted.try_acquire("k", permits=2), algorithm


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_crash_under_load(how: str, durable_node: Node) -> None:
    """Every call that was granted is in the file: with what the policy answers left out, the limit holds."""
    limit = 2000
    url = durable_node.bare_url + "?timeout=0.5&connect_timeout=0.5"
    with Load(how, url, f"{limit}/30d", on_store_error="deny") as load:
        load.wait_for(lambda answer: answer.by_store)
        durable_node.kill()
        durable_node.restart()
        load.wait_for(lambda answer: answer.by_store and not answer.admitted)
    assert not load.errors
    lost = sum(not answer.by_store for answer in load.answers)
    assert limit - lost <= load.admitted <= limit


def test_restart_of_the_application(node: Node) -> None:
    """State survives the application."""
    for expected in (4, 3, 2, 1, 0):
        with Limiter("5/30d", store=node.bare_url + PATIENT) as limiter:
            assert limiter.try_acquire("k").remaining == expected
