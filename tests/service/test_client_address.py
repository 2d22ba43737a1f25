"""The address that the service goes by: a peer that is not trusted cannot name another one."""

from collections.abc import Mapping

import pytest

from tests.service.conftest import Start
from tests.support.forged import FORGED
from tests.support.service import Service


@pytest.mark.parametrize("headers", FORGED, ids=lambda headers: str(headers)[:40])
def test_forged(service: Service, headers: Mapping[str, str]) -> None:
    """A header of a peer that is not trusted changes nothing."""
    assert service.remaining(headers=headers).json["key"] == "127.0.0.1"


def test_a_trusted_peer_is_believed(start: Start) -> None:
    service = start(environment={"HEADGATE_TRUSTED_PROXIES": "127.0.0.0/8, 10.0.0.0/8"})
    spent = service.check(headers={"X-Forwarded-For": "6.6.6.6, 1.2.3.4, 10.1.1.1"}, algorithm="SLIDING_WINDOW")
    assert spent.json["key"] == "1.2.3.4"
    assert service.check(headers={"X-Real-IP": "1.2.3.5"}).json["key"] == "1.2.3.5"
    assert service.check(headers={"X-Forwarded-For": "2001:db8::1"}).json["key"] == "2001:db8::/64"
    assert service.check(headers={"X_Forwarded_For": "1.2.3.4"}).json["key"] == "127.0.0.1"
    assert service.check("named", {"X-Forwarded-For": "1.2.3.4"}).json["key"] == "named"
    left = service.remaining(headers={"X-Forwarded-For": "1.2.3.4"}, permits=0, algorithm="SLIDING_WINDOW")
    assert left.json["remaining"] == 99
