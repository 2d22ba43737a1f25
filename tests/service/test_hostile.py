"""Hostile requests: refused at little cost, while other clients are served."""

import json
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import InvalidKey
from headgate.keys import check_key
from headgate.service.batch import count_objects
from tests.service.conftest import Start
from tests.support.service import API, Service

CHECK = API.encode() + b"/check"


def raw(service: Service, data: bytes) -> bytes:
    """Everything that comes back for these bytes; nothing if the connection was just closed."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        try:
            connection.sendall(data)
        except OSError:
            pass  # it has heard enough
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except OSError:
            pass
        return found


def get(query: bytes, headers: bytes = b"") -> bytes:
    return b"GET " + CHECK + b"?" + query + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n"


REFUSED = {
    "a key of a megabyte": get(b"key=" + b"a" * 1_000_000),
    "a key of 70 KB": get(b"key=" + b"a" * 70_000),
    "a key of 60 KB": get(b"key=" + b"a" * 60_000),
    "an encoded NUL": get(b"key=%00"),
    "a plain NUL": get(b"key=\0"),
    "a plain line break": get(b"key=a\r\nX-Evil: 1"),
    "an encoded line break": get(b"key=a%0d%0aX-Evil:%201"),
    "bytes that are no text": get(b"key=\xff\xfe"),
    "encoded bytes that are no text": get(b"key=%c3%28"),
    "half a surrogate": get(b"key=%ed%a0%80"),
    "a terminal escape": get(b"key=%1b[31m"),
    "twenty thousand parameters": get(b"&".join(b"a%d=1" % i for i in range(6000))),
    "nothing but ampersands": get(b"&" * 60_000),
    "the same parameter": get(b"&".join([b"key=a"] * 1000)),
    "many headers": get(b"key=a", b"".join(b"X-%d: b\r\n" % i for i in range(1000))),
    "a header of 200 KB": get(b"key=a", b"X-Big: " + b"b" * 200_000 + b"\r\n"),
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no such method": b"BREW " + CHECK + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a body of two lengths": b"POST "
    + CHECK
    + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a body that is too long": (
        b"POST " + CHECK + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: 9999999999\r\n\r\n{"
    ),
    "a body without an end": (
        b"POST " + CHECK + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 20
    ),
    "deep JSON": (
        b"POST " + CHECK + b"/batch HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: 500000\r\n\r\n" + b"[" * 500_000
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(service: Service, key: str, what: str) -> None:
    """A hostile request is refused, and the next client is served."""
    found = raw(service, REFUSED[what])
    assert found == b"" or found.startswith(b"HTTP/1.1 4"), found[:200]
    head, _, body = found.partition(b"\r\n\r\n")
    if body:  # else the server itself refused, before there was a request to answer
        assert b"content-type: application/problem+json" in head
        assert json.loads(body)["detail"]
    assert b"X-Evil" not in head and b"\nevil" not in head
    assert service.check(key).status == 200


@given(st.text(max_size=300))
def test_any_key(service: Service, text: str) -> None:
    """Any text is either refused or comes back as the key."""
    try:
        check_key(text)
    except InvalidKey:
        answer = service.remaining(text)
        assert answer.status == 400 and answer.problem
    else:
        assert service.remaining(text).json["key"] == text
        sent = service.ask("POST", f"{API}/check", body={"key": text, "algorithm": "GCRA"})
        assert sent.status in (200, 429) and sent.json["key"] == text


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="#"), max_size=80))
def test_any_query_is_answered(service: Service, query: str) -> None:
    assert service.get(f"{API}/remaining", query).status in (200, 400)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=9), st.lists, max_leaves=4))
def test_any_json_is_answered(service: Service, value: object) -> None:
    for body in (value, {"key": value}, {"permits": value}, [{"rule": value}]):
        for path in ("check", "check/batch"):
            assert service.ask("POST", f"{API}/{path}", body=body).status in (200, 400, 429)


def test_long_body(service: Service) -> None:
    """A body is read up to the limit; a longer one is a 413."""
    head = b"POST " + CHECK + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = raw(service, head + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 20 + b"0\r\n\r\n")
    assert found == b"" or found.startswith(b"HTTP/1.1 413"), found[:200]
    answer = service.ask("POST", f"{API}/check", body=b" " * 1_000_000 + b'{"key": "long way"}')
    assert answer.status == 200


@pytest.mark.parametrize("fields", [b"X: " + b"a" * 200_000 + b"\r\n", b"X: a\r\n" * 150], ids=["long", "many"])
def test_too_large_a_head_is_refused(service: Service, key: str, fields: bytes) -> None:
    start = b"GET " + CHECK + b"?key=" + key.encode() + b" HTTP/1.1\r\nHost: x\r\n"
    found = raw(service, start + fields + b"\r\n")
    assert found == b"" or found.startswith(b"HTTP/1.1 431"), found[:200]
    assert service.remaining(key, permits=0).json["remaining"] == 100


def post(key: str, headers: bytes, rest: bytes = b"") -> bytes:
    query = f"?key={key}&algorithm=SLIDING_WINDOW".encode()  # which, unlike a bucket, does not fill meanwhile
    start = b"POST " + CHECK + query + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return start + b"Content-Type: application/json\r\n" + headers + b"\r\n" + rest


BROKEN = {
    "none of it": (b"Content-Length: 10\r\n", b""),
    "half of it": (b"Content-Length: 30\r\n", b'{"permits": 2}'),
    "no chunk": (b"Transfer-Encoding: chunked\r\n", b""),
    "a chunk that is none": (b"Transfer-Encoding: chunked\r\n", b"zz\r\n{}\r\n0\r\n\r\n"),
    "half a chunk": (b"Transfer-Encoding: chunked\r\n", b'20\r\n{"permits": 2'),
    "all but the last chunk": (b"Transfer-Encoding: chunked\r\n", b'e\r\n{"permits": 2}\r\n'),
    "half the last chunk": (b"Transfer-Encoding: chunked\r\n", b'e\r\n{"permits": 2}\r\n0\r\n'),
}


@pytest.mark.parametrize("what", BROKEN)
def test_half_a_body_is_none(service: Service, key: str, what: str) -> None:
    data = post(key, *BROKEN[what])
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = connection.recv(65536)
        assert found == b"" or found.startswith(b"HTTP/1.1 400"), found
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(data)  # and gone
    service.take_turns()  # by now both have been looked at
    assert service.remaining(key, algorithm="SLIDING_WINDOW", permits=0).json["remaining"] == 100


@pytest.mark.parametrize(
    "headers, end",
    [(b"", b"\r\n"), (b"Trailer: Digest\r\n", b"Digest: x\r\n\r\n")],
    ids=["plain", "with trailers"],
)
def test_chunks(service: Service, key: str, headers: bytes, end: bytes) -> None:
    """A chunked body counts once its last chunk has come."""
    chunks = b'7\r\n{"permi\r\n7\r\nts": 2}\r\n0\r\n' + end
    for number, part in enumerate((chunks, chunks[:9], chunks[:20])):  # at once, and in two pieces
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            connection.sendall(post(f"{key}-{number}", b"Transfer-Encoding: chunked\r\n" + headers, part))
            if len(part) < len(chunks):
                time.sleep(0.05)  # so that they do not arrive as one
                connection.sendall(chunks[len(part) :])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert service.remaining(f"{key}-{number}", algorithm="SLIDING_WINDOW", permits=0).json["remaining"] == 98


def test_silent_clients(service: Service, key: str) -> None:
    """A body has ten seconds, and so has a head, and a connection until its first byte."""
    silent = {
        "no byte": b"",
        "half a head": b"GET / HT",
        "between two requests": get(b"").replace(b"Connection: close\r\n", b""),
        "half a body": post(key, b"Content-Length: 10\r\n", b"{"),
    }
    open_ones = {what: socket.create_connection(("127.0.0.1", service.port), timeout=60) for what in silent}
    found = dict.fromkeys(silent, b"")
    for what, connection in open_ones.items():
        connection.sendall(silent[what])
    for what, connection in open_ones.items():
        with connection:
            while part := connection.recv(65536):  # an error if it is still open after a minute
                found[what] += part
    assert found["half a body"].startswith(b"HTTP/1.1 408") and b"application/problem+json" in found["half a body"]
    assert service.remaining(key, algorithm="SLIDING_WINDOW", permits=0).json["remaining"] == 100


def test_empty_pairs_are_nothing(service: Service, key: str) -> None:
    assert service.get(f"{API}/check", f"&&key={key}&&permits=2&").json["remaining"] == 98


def test_a_long_query_is_refused_as_one(service: Service) -> None:
    for path in ("check", "remaining"):
        answer = service.get(f"{API}/{path}", "key=a" + "&" * 20_000)
        assert answer.status == 414 and "8192" in answer.problem


def test_long_batch(service: Service, key: str) -> None:
    """A batch of too many checks is refused before it is parsed."""
    answer = service.ask("POST", f"{API}/check/batch", body=b"[" + b"{}," * 340_000 + b"{}]")
    assert answer.status == 400 and "at most 1000" in answer.problem
    braces = [{"key": key + '{{{"' + str(i), "permits": 1} for i in range(1000)]
    assert service.ask("POST", f"{API}/check/batch", body=braces).status == 200
    assert service.ask("POST", f"{API}/check/batch", body=[*braces, {}]).status == 400


@pytest.mark.parametrize(
    "text, more",
    [
        (b'"' + b'\\"' * 200_000, 0),
        (b'"\\', 0),
        (b'{"', 1),
        (b'"' * 200_001, 200_001 // 14 - 1001),
        (b'"{"', 1),
        (b"{", 2),
    ],
)
def test_objects_are_counted_in_any_text(text: bytes, more: int) -> None:
    assert count_objects(b"{" * 1001 + text + b"{") == 1001 + more


@pytest.mark.parametrize(
    "query, sent", [("permits=1", {"permits": 1}), ("wait=0", {"wait": 0}), ("key=a", {"key": "a"})]
)
def test_query_and_body(service: Service, query: str, sent: dict[str, object]) -> None:
    """A parameter in the query and in the body is refused."""
    answer = service.ask("POST", f"{API}/check", query, sent)
    assert answer.status == 400 and "give it once" in answer.problem


def test_refused_keys_in_log(start: Start) -> None:
    """The log of a refusal does not show the key."""
    service = start("--log-level", "DEBUG")
    assert service.check("k", rule="hush" * 30).status == 400
    assert service.check("k", permits="it's \"hush").status == 400
    assert service.ask("POST", f"{API}/check", body={"hush": 1}).status == 400
    assert service.check("hush-\x01").status == 400
    assert service.get(f"{API}/check", {"hush": "1"}).status == 400
    assert "400: unknown parameter '...'; known are" in service.log() and "hush" not in service.log()


ODD = {
    "a request id that is no text": b"X-Request-Id: \xff\xfe\r\n",
    "a token that is no text": b"Authorization: Bearer \xff\r\n",
    "an address that is no text": b"X-Forwarded-For: \xff, 1.2.3.4\r\n",
    "a request id with a tab": b"X-Request-Id: a\tb\r\n",
    "a content type that is no text": b"Content-Type: \xff\r\nContent-Length: 0\r\n",
    "a header without a value": b"X-Forwarded-For:\r\n",
}


@pytest.mark.parametrize("what", ODD)
def test_odd_headers_change_nothing(service: Service, key: str, what: str) -> None:
    found = raw(service, get(b"key=" + key.encode(), ODD[what]))
    assert found.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")), found[:200]
    assert service.check(key).status == 200


def test_odd_proxy_headers(start: Start) -> None:
    """Malformed headers of a trusted proxy are answered, and cause no error."""
    service = start(
        environment={"HEADGATE_ADMIN_TOKEN": "t", "HEADGATE_TRUSTED_PROXIES": "127.0.0.1", "HEADGATE_CHECK_TOKEN": "c"},
        config="[rules.h]\nquotas = '1/s'\nkey = ['header:X-Api-Key']\n",
    )
    token = b"Authorization: Bearer t\r\n"
    for odd in ODD.values():
        found = raw(service, get(b"", (token if b"Bearer" not in odd else b"") + odd))
        assert found.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 401")), found[:200]
    found = raw(service, get(b"rule=h", token + b"X-Api-Key: \xff\xff\r\n"))
    assert found.startswith(b"HTTP/1.1 4"), found[:200]
    found = raw(service, get(b"rule=h", token + b"X-Api-Key: " + b"k" * 300 + b"\r\n"))
    assert found.startswith(b"HTTP/1.1 400") and b"300 bytes" in found
    assert "Traceback" not in service.log()


def test_slow_heads(service: Service, key: str) -> None:
    """Clients that send their head slowly do not delay others."""
    slow = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(100)]
    try:
        for connection in slow:
            connection.sendall(b"GET " + CHECK + b" HTTP/1.1\r\nX-Slow: ")
        for _ in range(20):
            assert service.check(key).status == 200
    finally:
        for connection in slow:
            connection.close()


def test_flood_of_keys(start: Start) -> None:
    """A flood of keys stays within the bound, and a key at its limit stays limited."""
    service = start(config="max_keys = 2000\n")
    service.check("greedy", algorithm="SLIDING_WINDOW", permits=100)
    connection = service.connect()
    for i in range(10):
        checks = [{"key": f"flood-{i}-{j}", "algorithm": "SLIDING_WINDOW"} for j in range(1000)]
        answer = service.on(connection, "POST", f"{API}/check/batch", body=checks)
        assert answer.status == 200 and len(answer.json) == 1000
    connection.close()
    assert service.check("greedy", algorithm="SLIDING_WINDOW").status == 429
    assert service.get("/actuator/health").json["components"]["store"]["keys"] <= 2000


def test_flood_of_denials(start: Start) -> None:
    """A flood of denied keys stays within the bound."""
    service = start(config="[rules.tiny]\nquotas = '1/hour'\n")
    connection = service.connect()
    for i in range(5):
        checks = [{"key": f"k-{i}-{j // 2}", "rule": "tiny"} for j in range(1000)]
        assert service.on(connection, "POST", f"{API}/check/batch", body=checks).status == 200
    connection.close()
    connection = service.connect()
    connection.request("GET", "/live")
    answer = connection.getresponse()
    for _ in range(3):
        line = answer.readline()
        answer.readline()
        shown = json.loads(line.removeprefix(b"data: "))["denied_keys"]
        if shown:
            break
    assert len(shown) <= 20
    connection.close()


def test_many_at_once(service: Service, key: str) -> None:
    """Half a hundred clients on one key: exactly the limit gets through."""
    granted: list[int] = []

    def client() -> None:
        connection = service.connect()
        for _ in range(4):
            answer = service.on(
                connection, "GET", f"{API}/check", {"key": key, "algorithm": "SLIDING_WINDOW", "permits": 1}
            )
            granted.append(answer.status)
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert granted.count(200) == 100 and granted.count(429) == 100
