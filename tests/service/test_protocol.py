"""HTTP at its edges: clients that close early, fields given twice, framing that two servers could read differently."""

import json
import socket
import struct

import pytest

from headgate.service.responses import MAX_PEERS, Delivery
from tests.service.conftest import Start
from tests.support.clocks import until
from tests.support.service import API, Service

CLIENTS = 20
WINDOW = "algorithm=SLIDING_WINDOW"  # a window, unlike a bucket, does not refill during the test


def exchange(service: Service, data: bytes, half_close: bool = False) -> bytes:
    """Send *data* on a connection of its own and return all that comes back.

    With *half_close* the last bytes and the end of the stream travel in one segment, so the server meets both at once.
    """
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(data, getattr(socket, "MSG_MORE", 0) if half_close else 0)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:
            pass
        return found


def request(line: str, *fields: str, body: bytes = b"") -> bytes:
    """One request; the server closes the connection after its answer."""
    head = [f"{line} HTTP/1.1", *fields, "Connection: close"]
    if body:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


def spent(service: Service, key: str) -> int:
    left: int = service.remaining(key, permits=0, algorithm="SLIDING_WINDOW").json["remaining"]
    return 100 - left


def _checks(key: str) -> dict[str, bytes]:
    one = {"key": key, "algorithm": "SLIDING_WINDOW"}
    return {
        "query": request(f"GET {API}/check?key={key}&{WINDOW}", "Host: x"),
        "wait": request(f"GET {API}/check?key={key}&{WINDOW}&wait=1", "Host: x"),
        "body": request(f"POST {API}/check", "Host: x", body=json.dumps(one).encode()),
        "batch": request(f"POST {API}/check/batch", "Host: x", body=json.dumps([one]).encode()),
    }


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_half_close(start: Start, service: Service, key: str, store: str, redis_url: str) -> None:
    """A client that half-closes after its request is charged for the answers that it gets, and for no others."""
    if store == "redis":
        service = start("--store", redis_url)
    for kind in _checks(""):
        half, whole = f"{key}-{kind}-half", f"{key}-{kind}-whole"
        answers = [exchange(service, _checks(half)[kind], half_close=True) for _ in range(CLIENTS)]
        service.take_turns()
        answered = sum(found.startswith(b"HTTP/1.1 200") for found in answers)
        # The HTTP server may meet the end of the stream just after it took the answer: of twenty, one at most.
        until(lambda name, most: spent(service, name) <= most, half, answered + 1)
        assert answered <= spent(service, half), kind
        answers = [exchange(service, _checks(whole)[kind]) for _ in range(CLIENTS)]
        assert all(found.startswith(b"HTTP/1.1 200") for found in answers)
        assert spent(service, whole) == CLIENTS
    assert "Traceback" not in service.log()


def test_reads_the_status_and_leaves(service: Service, key: str) -> None:
    """A client that closes as soon as it has read the status line is charged: it has its answer."""
    for kind in _checks(""):
        for _ in range(CLIENTS):
            with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
                connection.sendall(_checks(f"{key}-{kind}")[kind])
                assert connection.recv(12) == b"HTTP/1.1 200"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
        service.take_turns()
        assert spent(service, f"{key}-{kind}") == CLIENTS


def test_answers_of_one_connection(service: Service, key: str) -> None:
    """The first answer of a connection, which is sent in another way, reads like the later ones."""
    connection = service.connect()
    query = {"key": f"{key}-é", "algorithm": "SLIDING_WINDOW"}
    found = [service.on(connection, "GET", f"{API}/check", query, headers={"X-Request-Id": "r-1"}) for _ in range(3)]
    connection.close()
    assert [answer.json["remaining"] for answer in found] == [99, 98, 97]
    for answer in found:
        assert answer.status == 200 and answer.json["key"] == query["key"]
        assert sorted(answer.headers.keys()) == sorted(found[0].headers.keys())
        assert answer.headers["x-request-id"] == "r-1" and int(answer.headers["content-length"]) == len(answer.body)


def test_known_peers() -> None:
    """A peer is first once, until it has sent nothing for two rotations; their number is bounded."""
    delivery = Delivery()
    assert delivery.is_first("a") and "a" in delivery.recent
    delivery.rotate()
    assert "a" not in delivery.recent and not delivery.is_first("a"), "an active connection stays known"
    delivery.rotate()
    delivery.rotate()
    assert delivery.is_first("a")
    for number in range(MAX_PEERS + 10):
        delivery.is_first(str(number))
    assert len(delivery.recent) <= MAX_PEERS


TWICE = {
    "key": b'{"key": "K", "key": "K"}',
    "permits": b'{"key": "K", "permits": 1, "permits": 2}',
    "null first": b'{"key": null, "key": "K"}',
    "null last": b'{"key": "K", "key": null}',
    "escaped name": b'{"key": "K", "k\\u0065y": "K"}',
    "wait": b'{"wait": 0, "key": "K", "wait": 0}',
}


@pytest.mark.parametrize("kind", TWICE)
def test_field_twice(service: Service, key: str, kind: str) -> None:
    """A field given twice is refused by name, in a check and in any check of a batch, and nothing is spent."""
    body = TWICE[kind].replace(b"K", key.encode())
    name = kind if kind in ("permits", "wait") else "key"
    answer = service.ask("POST", f"{API}/check", body=body, headers={"content-type": "application/json"})
    assert answer.status == 400 and f"{name!r} is given twice; give it once" in answer.problem
    if name != "wait":
        batch = b'[{"key": "' + key.encode() + b'"}, ' + body + b"]"
        answer = service.ask("POST", f"{API}/check/batch", body=batch, headers={"content-type": "application/json"})
        assert answer.status == 400 and f"{name!r} is given twice; give it once" in answer.problem
        assert "check 2 of 2, $[1]" in answer.problem
    assert service.remaining(key, permits=0).json["remaining"] == 100


def test_field_twice_in_the_playground(service: Service) -> None:
    body = b'{"session": "s", "quota": "1/s", "session": "t"}'
    answer = service.ask("POST", "/playground/check", body=body, headers={"content-type": "application/json"})
    assert answer.status == 400 and "'session' is given twice; give it once" in answer.problem


def test_values_like_names(service: Service) -> None:
    """A value may read like the name of a field."""
    for body in ({"key": "key", "rule": "default"}, {"key": '"key"'}, {"key": 'a", "key": "b'}):
        assert service.ask("POST", f"{API}/check", body=body).json["key"] == body["key"]
        assert service.ask("POST", f"{API}/check/batch", body=[body, body]).json[1]["key"] == body["key"]


HOSTS = {
    "none": [],
    "two": ["Host: a", "Host: b"],
    "the same twice": ["Host: a", "Host: a"],
}


@pytest.mark.parametrize("kind", HOSTS)
def test_host(service: Service, key: str, kind: str) -> None:
    """HTTP/1.1 asks for one Host field: a request with none, or with two, is a 400 that spends nothing."""
    for path in (f"{API}/check?key={key}", "/", "/nothing"):
        found = exchange(service, request(f"GET {path}", *HOSTS[kind]))
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and b"content-type: application/problem+json" in head
        assert "Host" in json.loads(body)["detail"]
    assert service.remaining(key, permits=0).json["remaining"] == 100


def test_host_of_http_1_0(service: Service, key: str) -> None:
    """HTTP/1.0 knows no Host field."""
    found = exchange(service, f"GET {API}/check?key={key} HTTP/1.0\r\n\r\n".encode())
    assert found.split(b" ")[1] == b"200"


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked, chunked", "gzip", "identity", "xchunked"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_transfer_encoding(service: Service, key: str, method: str, coding: str) -> None:
    """A body in any transfer coding but `chunked` is a 400: the service could not read it."""
    data = request(f"{method} {API}/check?key={key}", "Host: x", f"Transfer-Encoding: {coding}") + b"0\r\n\r\n"
    found = exchange(service, data)
    assert found.startswith(b"HTTP/1.1 400"), found[:200]
    assert service.remaining(key, permits=0).json["remaining"] == 100


def test_encoded_slash(service: Service, key: str) -> None:
    """The HTTP server decodes the path before the service sees it, so an encoded slash is a slash."""
    path = API.replace("/v1/", "/v1%2f") + "/check"
    assert service.get(path, {"key": key}).json["remaining"] == 99
