"""The gRPC listener, asked by Google's client and by hand."""

import asyncio
import itertools
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc

from headgate.service.envoy_settings import GrpcSettings
from headgate.service.files import read_file
from headgate.service.grpc import WRITE_BUFFER, GrpcConnection
from headgate.service.grpc_calls import HEALTH_CHECK, MAX_MESSAGE, RATE_LIMIT_SERVICE, SHOULD_RATE_LIMIT
from headgate.service.http2.frames import (
    ACK,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    MAX_STREAM_ID,
    NO_ERROR,
    PING,
    PREFACE,
    WINDOW_UPDATE,
    frame,
)
from headgate.service.http2.hpack import encode
from headgate.service.settings import BadFile, Settings
from headgate.service.shared_counters import STOPPING
from tests.service.conftest import Start
from tests.support.grpc_worker import LIMITS, PATIENCE, SERVED, Certificates, GrpcWorker, Worker, start_worker
from tests.support.http2 import EMPTY_SETTINGS, data, frames, goaways, headers
from tests.support.servers import free_port
from tests.support.service import eventually

pytestmark = pytest.mark.server

__all__ = ["start_worker"]  # a fixture

WIDE = frame(WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4, "big"))  # room for everything that the server has to say


@pytest.fixture
def worker(start_worker: Worker) -> GrpcWorker:
    return start_worker()


def request(what: str = "now", value: object = 7, domain: str = "demo") -> Any:
    entry = {"key": what, "value": str(value)}
    return rls_pb2.RateLimitRequest(domain=domain, descriptors=[{"entries": [entry]}])


def ask(channel: grpc.Channel, *arguments: Any, **options: Any) -> Any:
    options.setdefault("timeout", PATIENCE)
    return rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit(request(*arguments), **options)


def code_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Status and text of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code().name, raised.value.details()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, None])
@pytest.mark.parametrize("what", ["now", "later"])
def test_answer(start_worker: Worker, what: str, new_loop: Any) -> None:
    """A client gets the answer of the rules, decided at once or later, on either event loop."""
    worker = start_worker(**({"new_loop": new_loop} if new_loop else {}))
    with grpc.insecure_channel(worker.target) as channel:
        found = ask(channel, what, 42)
        assert found.overall_code == rls_pb2.RateLimitResponse.OK
        [status] = found.statuses
        assert status.limit_remaining == 42
        assert (status.current_limit.requests_per_unit, status.current_limit.unit) == (100, 2)
        assert status.duration_until_reset.seconds == 60
        over = ask(channel, "over", 3)
        assert over.overall_code == rls_pb2.RateLimitResponse.OVER_LIMIT
        assert [(one.key, one.value) for one in over.response_headers_to_add] == [("retry-after", "3")]
    assert worker.failures() == 0


async def test_many_at_once(worker: GrpcWorker) -> None:
    """A thousand calls at once on one connection, some decided later, each get their own answer."""
    async with grpc.aio.insecure_channel(worker.target) as channel:
        stub = rls_pb2_grpc.RateLimitServiceStub(channel)
        calls = [stub.ShouldRateLimit(request(("now", "later")[i % 2], i), timeout=PATIENCE) for i in range(1_000)]
        answers = await asyncio.gather(*calls)
    assert [found.statuses[0].limit_remaining for found in answers] == list(range(1_000))


FAILURES = {
    "outage now": ("UNAVAILABLE", "the store does not answer: nothing at redis:6379"),
    "outage": ("UNAVAILABLE", "the store does not answer: nothing at redis:6379"),
    "wrong": ("INVALID_ARGUMENT", "the domain is empty"),
    "bug": ("INTERNAL", "an error of the service, not of the call; its log has more"),
    "bug later": ("INTERNAL", "an error of the service, not of the call; its log has more"),
}


def test_failures(worker: GrpcWorker, caplog: pytest.LogCaptureFixture) -> None:
    """Each failure has the status that fits, and its connection goes on; none is UNKNOWN, which Envoy lets pass."""
    with grpc.insecure_channel(worker.target) as channel:
        for what, expected in FAILURES.items():
            assert code_of(partial(ask, channel, what)) == expected
        assert worker.failures() == len(FAILURES)
        assert len([one for one in caplog.records if one.levelname == "ERROR"]) == 2
        broken = channel.unary_unary(SHOULD_RATE_LIMIT)
        status, why = code_of(lambda: broken(b"\x0a\x05ab", timeout=PATIENCE))
        assert status == "INVALID_ARGUMENT" and "longer than its message" in why
        assert ask(channel).statuses[0].limit_remaining == 7


def test_bounds(worker: GrpcWorker) -> None:
    """Large metadata and messages pass up to their bounds; beyond, and compressed, they are refused with a reason."""
    with grpc.insecure_channel(worker.target) as channel:
        assert ask(channel, metadata=[("x-large", "v" * 8_000)])
        status, _ = code_of(lambda: ask(channel, metadata=[("x-large", "v" * 20_000)]))
        assert status == "RESOURCE_EXHAUSTED"
        room = MAX_MESSAGE - len(request().SerializeToString()) - 4
        assert ask(channel, "now", 7, "demo" + "d" * (room - 4))
        for size in (room + 1_000, 5 * MAX_MESSAGE):
            over = ask(channel, "now", 7, "d" * size)  # after an error Envoy would let the request pass
            assert over.overall_code == rls_pb2.RateLimitResponse.OVER_LIMIT and not over.statuses
        status, why = code_of(lambda: ask(channel, "now", 7, "d" * 5_000, compression=grpc.Compression.Gzip))
        assert status == "UNIMPLEMENTED" and "identity" in why
        assert ask(channel)


def test_large_metadata_of_a_rude_client(worker: GrpcWorker) -> None:
    """A client that ignores the announced bound for metadata fails that call, and keeps its connection."""
    call = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", SHOULD_RATE_LIMIT),
        ("content-type", "application/grpc"),
    ]
    large = encode([*call, *((f"x-{i}", "v" * 1_000) for i in range(20))])
    with socket.create_connection(("127.0.0.1", worker.port), PATIENCE) as client:
        client.sendall(PREFACE + EMPTY_SETTINGS + headers(1, 0x01, large[:16_000]))
        client.sendall((len(large) - 16_000).to_bytes(3, "big") + b"\x09\x04\0\0\0\1" + large[16_000:])
        client.sendall(headers(3, 0x05, encode(call)))
        heard = read_until(client, HEADERS, 3)
    assert b"grpc-status\x018" in next(one.payload for one in heard if one.stream_id == 1)


def read_until(client: socket.socket, kind: int, stream_id: int) -> list[Any]:
    """Frames up to the first of a kind on a stream."""
    received = b""
    while True:
        piece = client.recv(65_536)
        assert piece, "the connection was closed"
        received += piece
        whole = 0
        while whole + 9 <= len(received):
            after = whole + 9 + int.from_bytes(received[whole : whole + 3], "big")
            if after > len(received):
                break
            whole = after
        found = list(frames(received[:whole]))
        if any(one.kind == kind and one.stream_id == stream_id for one in found):
            return found


def test_deadline(worker: GrpcWorker) -> None:
    """The deadline of a call bounds the decision, with some time left for the answer; later ones are cancelled."""
    with grpc.insecure_channel(worker.target) as channel:
        assert code_of(lambda: ask(channel, "never", timeout=0.4))[0] == "DEADLINE_EXCEEDED"
        [timeout] = worker.rules.timeouts
        assert timeout is not None and 0 < timeout < 0.4
        eventually(lambda: worker.rules.waiting == 0, "the decision is cancelled")
        assert worker.rules.cancelled == 1
        call = rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit.future(request("never"))
        eventually(lambda: worker.rules.waiting == 1, "the call has come")
        call.cancel()
        eventually(lambda: worker.rules.cancelled == 2, "the decision is cancelled")
        assert worker.rules.timeouts[1] is None


@pytest.mark.parametrize(
    "service, rules, stopping, expected",
    [
        ("", True, False, b"\x08\x01"),
        ("ratelimit", True, False, b"\x08\x01"),
        (RATE_LIMIT_SERVICE, True, False, b"\x08\x01"),
        ("", False, False, b"\x08\x01"),
        ("ratelimit", False, False, b"\x08\x02"),
        ("", True, True, b"\x08\x02"),
        ("other", True, False, "NOT_FOUND"),
    ],
)
def test_health(start_worker: Worker, service: str, rules: bool, stopping: bool, expected: bytes | str) -> None:
    """Health: serving, or not when the service stops or has no limits; no token is needed for it."""
    worker = start_worker(rules=rules, tokens=[("secret", "check")])
    worker.app.counters.header[STOPPING] = stopping
    with grpc.insecure_channel(worker.target) as channel:
        check = channel.unary_unary(HEALTH_CHECK)
        sent = b"\x0a" + bytes([len(service)]) + service.encode()
        if isinstance(expected, bytes):
            assert check(sent, timeout=PATIENCE) == expected
        else:
            assert code_of(lambda: check(sent, timeout=PATIENCE))[0] == expected


def test_unknown_methods(start_worker: Worker) -> None:
    """What is not there is UNIMPLEMENTED, as is every check while no limits are configured."""
    worker = start_worker(rules=False)
    with grpc.insecure_channel(worker.target) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        assert code_of(lambda: list(watch(b"", timeout=PATIENCE)))[0] == "UNIMPLEMENTED"
        assert code_of(lambda: channel.unary_unary("/a/b")(b"", timeout=PATIENCE)) == (
            "UNIMPLEMENTED",
            f"there is no method /a/b; {SHOULD_RATE_LIMIT[1:]} is here",
        )
        status, why = code_of(lambda: ask(channel))
        assert status == "UNIMPLEMENTED" and "[envoy] files" in why


def test_tokens(start_worker: Worker) -> None:
    """Where a token for checks is set, calls need one, of the right scope; new tokens hold for open connections."""
    from headgate.service.tokens import Tokens, digest

    worker = start_worker(tokens=[("right", "check"), ("reader", "read")])
    with grpc.insecure_channel(worker.target) as channel:
        right = [("authorization", "Bearer right")]
        status, why = code_of(lambda: ask(channel))
        assert status == "UNAUTHENTICATED" and "'check'" in why
        assert code_of(lambda: ask(channel, metadata=[("authorization", "Bearer wrong")]))[0] == "UNAUTHENTICATED"
        assert code_of(lambda: ask(channel, metadata=[("authorization", "Bearer reader")]))[0] == "PERMISSION_DENIED"
        twice = [*right, ("authorization", "Bearer wrong")]
        assert code_of(lambda: ask(channel, metadata=twice))[0] == "UNAUTHENTICATED"
        for _ in range(3):
            assert ask(channel, metadata=right)
        worker.state.tokens = Tokens([(digest("new"), "check")])
        assert code_of(lambda: ask(channel, metadata=right))[0] == "UNAUTHENTICATED"
        assert ask(channel, metadata=[("authorization", "Bearer new")])


def test_tls(start_worker: Worker, tmp_path: Path) -> None:
    """With a certificate the port speaks TLS and agrees on h2; a client that cannot trust it gets no answer."""
    made = Certificates(tmp_path)
    worker = start_worker(tls=made.plain)
    trusting = grpc.ssl_channel_credentials(made.authority)
    with grpc.secure_channel(worker.target, trusting) as channel:
        assert [ask(channel, what, 5).statuses[0].limit_remaining for what in ("now", "later")] == [5, 5]
        large = ask(channel, "now", 7, "d" * 60_000)
        assert large.overall_code == rls_pb2.RateLimitResponse.OK
    with grpc.secure_channel(worker.target, grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())) as channel:
        assert code_of(lambda: ask(channel))[0] == "UNAVAILABLE"
    context = ssl.create_default_context(cadata=made.authority.decode())
    context.set_alpn_protocols(["http/1.1", "h2"])
    with (
        socket.create_connection(("127.0.0.1", worker.port), PATIENCE) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as client,
    ):
        assert client.selected_alpn_protocol() == "h2"


def test_mutual_tls(start_worker: Worker, tmp_path: Path) -> None:
    """With an authority for clients, only a client with a certificate of it gets an answer."""
    made = Certificates(tmp_path)
    worker = start_worker(tls=made.mutual)
    known = grpc.ssl_channel_credentials(made.authority, made.client_key, made.client_chain)
    with grpc.secure_channel(worker.target, known) as channel:
        assert ask(channel)
    with grpc.secure_channel(worker.target, grpc.ssl_channel_credentials(made.authority)) as channel:
        assert code_of(lambda: ask(channel))[0] == "UNAVAILABLE"


class Callers:
    """Threads that call all the time, each on a connection of its own."""

    def __init__(self, target: str, count: int, asked: Sequence[str] = ("now", "later")) -> None:
        self.answered = [0] * count
        self.errors: list[str] = []
        self._asked = asked
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(target, i)) for i in range(count)]
        for one in self._threads:
            one.start()

    def _call(self, target: str, i: int) -> None:
        with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            while not self._ended.is_set():
                try:
                    ask(channel, self._asked[self.answered[i] % len(self._asked)], i)
                except grpc.RpcError as error:
                    self.errors.append(f"{error.code()}: {error.details()}")
                self.answered[i] += 1

    def all_call(self, more: int) -> None:
        """Wait until each has got that many more answers."""
        wanted = [found + more for found in self.answered]
        eventually(lambda: all(a >= b for a, b in zip(self.answered, wanted, strict=True)), "all get answers")

    def end(self) -> None:
        self._ended.set()
        for one in self._threads:
            one.join(PATIENCE)


def test_graceful_stop(start_worker: Worker) -> None:
    """A worker that stops while clients call fails no call: they go on with the worker that shares its port."""
    first = start_worker()
    callers = Callers(first.target, 4)
    try:
        callers.all_call(20)
        second = start_worker(port=first.port)
        first.close_listener()
        assert not first.listener.connections
        callers.all_call(20)
        assert len(second.listener.connections) == 4
    finally:
        callers.end()
    assert callers.errors == []


def test_stop_answers_what_runs(worker: GrpcWorker) -> None:
    """A call that has not been decided when the worker stops is answered before its connection is closed."""
    with grpc.insecure_channel(worker.target) as channel:
        call = rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit.future(request("never", 3), timeout=PATIENCE)
        eventually(lambda: worker.rules.waiting == 1, "the call has come")
        closing = asyncio.run_coroutine_threadsafe(worker.listener.close(), worker.loop)
        [connection] = worker.listener.connections
        assert isinstance(connection, GrpcConnection)
        eventually(connection._http2.draining, "the client is told")
        worker.let_go()
        assert call.result().statuses[0].limit_remaining == 3
        closing.result(PATIENCE)


def test_connection_age(start_worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old connections are replaced, at different ages, and no call fails because of it."""
    monkeypatch.setattr("headgate.service.grpc.TICK", 0.02)
    worker = start_worker(grpc=GrpcSettings(max_connection_age=0.5))
    seen: set[object] = set()
    callers = Callers(worker.target, 2)

    def replaced() -> bool:
        seen.update(tuple(worker.listener.connections))
        return len(seen) >= 6

    try:
        eventually(replaced, "connections are replaced")
        callers.all_call(5)
    finally:
        callers.end()
    assert callers.errors == []
    assert len({one._age_factor for one in seen if isinstance(one, GrpcConnection)}) == len(seen)


def test_no_connection_age(start_worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An age of 0 is no limit; a limit that is set later counts for connections that are open."""
    monkeypatch.setattr("headgate.service.grpc.TICK", 0.01)
    worker = start_worker(grpc=GrpcSettings(max_connection_age=0))
    with grpc.insecure_channel(worker.target) as channel:
        assert ask(channel)
        [connection] = eventually_some(worker)
        eventually(lambda: connection._ticks >= 100, "the connection grows old")
        assert not connection._http2.draining()
        worker.state.settings = Settings(grpc=GrpcSettings(max_connection_age=0.5))
        eventually(lambda: connection not in worker.listener.connections, "the connection is closed")
        assert ask(channel)


def test_connection_age_grace(start_worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that runs when its connection is too old is answered within the grace, and cut off after it."""
    monkeypatch.setattr("headgate.service.grpc.TICK", 0.02)
    worker = start_worker(grpc=GrpcSettings(max_connection_age=0.1, max_connection_age_grace=PATIENCE))
    with grpc.insecure_channel(worker.target) as channel:
        call = rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit.future(request("never", 3), timeout=PATIENCE)
        eventually(lambda: worker.rules.waiting == 1, "the call has come")
        [connection] = eventually_some(worker)
        eventually(lambda: connection._http2._final >= 0, "the last stream is announced")
        worker.let_go()
        assert call.result().statuses[0].limit_remaining == 3
        eventually(lambda: connection not in worker.listener.connections, "the connection is closed")
    worker.rules.go_on.clear()
    worker.state.settings = Settings(grpc=GrpcSettings(max_connection_age=0.1, max_connection_age_grace=0.2))
    with grpc.insecure_channel(worker.target) as channel:
        assert code_of(lambda: ask(channel, "never"))[0] == "UNAVAILABLE"
        eventually(lambda: worker.rules.cancelled == 1, "the decision is cancelled")


def test_idle_connections(start_worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without calls is closed after a while, and the client's next call opens another."""
    monkeypatch.setattr("headgate.service.grpc.TICK", 0.02)
    monkeypatch.setattr("headgate.service.grpc.IDLE", 0.2)
    worker = start_worker()
    with grpc.insecure_channel(worker.target) as channel:
        assert ask(channel)
        eventually(lambda: not worker.listener.connections, "the connection is closed")
        assert ask(channel)


def test_backpressure(worker: GrpcWorker) -> None:
    """A client that calls and never reads is not read any more; what is kept for it is bounded, others are served."""
    call = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", SHOULD_RATE_LIMIT),
        ("content-type", "application/grpc"),
    ]
    block, message = encode(call), request().SerializeToString()
    body = b"\0" + len(message).to_bytes(4, "big") + message
    with socket.create_connection(("127.0.0.1", worker.port), PATIENCE) as client:
        client.sendall(PREFACE + EMPTY_SETTINGS + WIDE)
        [connection] = eventually_some(worker)
        client.setblocking(False)
        numbers = itertools.count(1, 2)
        unsent = b""
        while not connection._write_paused:
            unsent = unsent or b"".join(
                headers(n, END_HEADERS, block) + data(n, body) for n in itertools.islice(numbers, 99)
            )
            try:
                unsent = unsent[client.send(unsent) :]
            except BlockingIOError:
                pass
        assert not connection._reading
        assert connection._transport.get_write_buffer_size() < WRITE_BUFFER + (1 << 20)
        with grpc.insecure_channel(worker.target) as channel:
            assert ask(channel)
        client.setblocking(True)
        while connection._write_paused:  # once it reads, its calls go on
            client.recv(1 << 20)
    eventually(lambda: connection not in worker.listener.connections, "the connection is forgotten")


def eventually_some(worker: GrpcWorker) -> list[GrpcConnection]:
    eventually(lambda: bool(worker.listener.connections), "the connection is there")
    found = list(worker.listener.connections)
    assert all(isinstance(one, GrpcConnection) for one in found)
    return found  # type: ignore[return-value]  # as was just checked


def test_turns(worker: GrpcWorker) -> None:
    """Many calls that come in one read are answered in several turns of the event loop, in order."""
    call = [(":method", "GET"), (":scheme", "http"), (":path", "/")]
    block = encode(call)
    numbers = range(1, 4_001, 2)
    spent: list[int] = []
    turn = worker.listener.turn
    spend = turn.spend

    def look_on(calls: int) -> None:
        spent.append(calls)
        spend(calls)

    turn.spend = look_on  # type: ignore[method-assign]  # to look on
    with socket.create_connection(("127.0.0.1", worker.port), PATIENCE) as client:
        client.sendall(PREFACE + EMPTY_SETTINGS + WIDE + b"".join(headers(n, 0x05, block) for n in numbers))
        heard = read_until(client, DATA, numbers[-1])
    assert [one.stream_id for one in heard if one.kind == DATA] == list(numbers)
    assert max(spent) <= 256 and len(spent) >= 4


if shutil.which("h2spec"):  # it is in no registry

    def test_h2spec(worker: GrpcWorker) -> None:
        """h2spec, where there is one, finds no fault with the port."""
        command = ["h2spec", "-h", "127.0.0.1", "-p", str(worker.port), "--timeout", "10"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout[-3000:]


def test_service(start: Start) -> None:
    """`headgate serve --grpc-port` opens the port, says so, and stops cleanly while a client is connected."""
    port = free_port()
    service = start("--grpc-port", str(port))
    assert f"grpc://127.0.0.1:{port}/" in service.log()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert channel.unary_unary(HEALTH_CHECK)(b"", timeout=PATIENCE, wait_for_ready=True) == b"\x08\x01"
        assert service.stop() == 0
    assert "Traceback" not in service.log() and "cut off" not in service.log()


def test_service_connection_age(start: Start) -> None:
    """With [grpc] max_connection_age, a client gets GOAWAY at that age; its next call is made elsewhere, none fails."""
    port = free_port()
    aged = SERVED + "[grpc]\nmax_connection_age = 1\n"
    service = start("--grpc-port", str(port), config=aged, files={"limits.yaml": LIMITS})
    callers = Callers(f"127.0.0.1:{port}", 2, ("now",))
    try:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
                client.sendall(PREFACE + EMPTY_SETTINGS)
                heard = read_until(client, GOAWAY, 0)
                assert goaways(heard) == [(MAX_STREAM_ID, NO_ERROR)]
                [ping] = [one for one in heard if one.kind == PING] or read_until(client, PING, 0)
                client.sendall(frame(PING, ACK, 0, ping.payload))
                assert goaways(read_until(client, GOAWAY, 0)) == [(0, NO_ERROR)]
                assert client.recv(100) == b""
        callers.all_call(5)
    finally:
        callers.end()
    assert callers.errors == []
    assert service.stop() == 0 and "cut off" not in service.log()


@pytest.mark.parametrize(
    "line, why",
    [
        (
            "max_connection_age = 0.5",
            "grpc.max_connection_age: 0.5 seconds would be spent on connecting; give",
        ),
        ("max_connection_age = -1", "grpc.max_connection_age: expected `float` >= 0"),
        ("max_connection_age = inf", "grpc.max_connection_age: expected `float` <= 31536000"),
        ("max_connection_age = '30m'", "grpc.max_connection_age: expected `float`, got `str`"),
        ("max_connection_age_grace = 0", "grpc.max_connection_age_grace: expected `float` >= 1"),
        (
            "max_age = 5",
            "grpc.max_age: there is no such setting; known are max_connection_age,",
        ),
    ],
)
def test_bad_settings(tmp_path: Path, line: str, why: str) -> None:
    """What [grpc] cannot mean is refused with its line and what would be right."""
    file = tmp_path / "headgate.toml"
    file.write_text(f"[grpc]\n{line}\n")
    with pytest.raises(BadFile) as raised:
        read_file(file)
    assert f"headgate.toml:2: {why}" in str(raised.value)
