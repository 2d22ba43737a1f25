"""Clients of the Redis protocol that send nonsense, too much or too slowly, or do not read."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.service import listeners
from headgate.service.listeners import CALLS_PER_TURN, NEW_SHARE, RESERVED, TurnBudget
from headgate.service.resp import throttle
from headgate.stores.memory import MemoryStore
from headgate.stores.shared import SharedStore
from tests.support.resp import RespListener, RespSocket, command
from tests.support.service import Service


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[RespListener]:
    made = RespListener(tmp_path)
    yield made
    made.close()


def test_nonsense(resp_service: Service, key: str) -> None:
    """Bytes that are no commands are refused in words, the connection ends, and others are served."""
    service = resp_service
    with RespSocket(service) as polite:
        for data, why in (
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 20_000, "at most 16384 bytes"),
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "this is HTTP"),
            (b"*1\r\n" * 4000, "expected '$', got '*'"),
            (b"*1000000000\r\n", "invalid multibulk length"),
            (b"*1\r\n$1000000000\r\n", "at most 16384 bytes"),
            (b"*2\r\n$4\r\nECHO\r\n:1\r\n", "expected '$', got ':'"),
            (command(*["a"] * 100), "at most 64 words"),
        ):
            with RespSocket(service) as client:
                client.send(command("PING") + data)
                found = client.replies()
                assert found[0] == "PONG" and found[-1].startswith("-ERR Protocol error") and why in found[-1], data[
                    :40
                ]
            assert polite.ask("PING") == "PONG"
        with RespSocket(service) as client:  # half a command, and then nothing
            client.send(command("PING") + command("CL.THROTTLE", key, 0, 1, 3600)[:-3])
            assert client.reply() == "PONG"
        assert polite.ask("CL.THROTTLE", key, 0, 1, 3600) == [0, 1, 0, -1, 3600]
    assert "Traceback" not in service.log()


def test_one_byte_at_a_time(resp_service: Service) -> None:
    """A slow client is answered in the end."""
    with RespSocket(resp_service) as client:
        for byte in command("CL.THROTTLE", "a\r\nb", 1, 1, 3600) + command("PING"):
            client.send(bytes([byte]))
        assert client.reply() == [0, 2, 1, -1, 3600]
        assert client.reply() == "PONG"


def test_client_that_does_not_read(resp_service: Service) -> None:
    """The service stops to read from a client that does not read; other clients, of HTTP too, are served."""
    with RespSocket(resp_service) as greedy, RespSocket(resp_service) as polite:
        greedy.socket.setblocking(False)
        chunk, sent, refused = command("INFO") * 1000, 0, 0
        while refused < 200:  # in a row: the service reads no more
            try:
                sent += greedy.socket.send(chunk)
                refused = 0
            except BlockingIOError:
                refused += 1
                assert polite.ask("PING") == "PONG"
            assert sent < 100_000_000, "it is read although it does not read"
        assert resp_service.check("a").status == 200
        greedy.socket.setblocking(True)  # once it reads, it gets its replies
        for _ in range(1000):
            assert "role:master" in greedy.reply()


def test_bound_of_connections(listener: RespListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection too many is told so and closed; when another ends, there is room again."""
    monkeypatch.setattr(listeners, "MAX_CONNECTIONS", 2)

    async def fill() -> None:
        first, second = await listener.connect(), await listener.connect()
        assert [await one.ask("PING") for one in (first, second)] == ["PONG", "PONG"]
        third = await listener.connect()
        assert await third.reply() == "-ERR max number of clients reached"
        assert await third.ended()
        first.writer.close()
        await first.writer.wait_closed()
        while len(listener.listener.connections) == 2:  # noqa: ASYNC110  # the event loop sees the end of it soon
            await asyncio.sleep(0)
        fourth = await listener.connect()
        assert await fourth.ask("PING") == "PONG"
        for one in (second, third, fourth):
            one.writer.close()

    listener.run(fill())


def test_silent_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that do not authenticate in time are closed, whatever else they send; the others stay."""
    listener = RespListener(tmp_path, token="secret")

    async def wait() -> None:
        silent, talkative, known = [await listener.connect() for _ in range(3)]
        assert (await talkative.ask("PING")).startswith("-NOAUTH")
        assert (await talkative.ask("AUTH", "guess")).startswith("-WRONGPASS")
        assert await known.ask("AUTH", "secret") == "OK"
        listener.listener.close_silent()  # in time
        assert (await talkative.ask("PING")).startswith("-NOAUTH")
        monkeypatch.setattr(listeners, "ADMIT_WITHIN", -1.0)
        listener.listener.close_silent()
        assert await silent.ended() and await talkative.ended()
        assert await known.ask("PING") == "PONG"
        for one in (silent, talkative, known):
            one.writer.close()

    try:
        listener.run(wait())
    finally:
        listener.close()


def test_turns(listener: RespListener) -> None:
    """Between two turns of the event loop no more calls are answered than one turn has room for."""
    answered: list[int] = []

    async def flood() -> None:
        turn = listener.listener.turn
        spend = turn.spend

        def counted(calls: int) -> None:
            answered[-1] += calls
            spend(calls)

        turn.spend = counted  # type: ignore[method-assign]  # counts, and does what it did
        clients = [await listener.connect() for _ in range(8)]
        for one in clients:
            one.writer.write(command("CL.THROTTLE", "k", 9, 1, 1) * 500)
        replies = asyncio.gather(*(one.reply() for one in clients for _ in range(1)))
        while sum(answered) < 8 * 500:
            answered.append(0)
            await asyncio.sleep(0)
        await replies
        for one in clients:
            one.writer.close()

    listener.run(flood())
    # a connection takes no more than is left; the limit that the first call makes counts as some more
    assert max(answered) <= CALLS_PER_TURN + throttle.NEW_LIMIT_CALLS


def test_polite_beside_floods() -> None:
    """However many connections wait in line with more calls than a turn has, some are left for one that comes new."""
    found: list[tuple[int, int]] = []

    async def wait() -> None:
        turn = TurnBudget(asyncio.get_running_loop())

        def flood() -> None:
            turn.spend(turn.share)
            turn.wait(flood)

        for _ in range(10):
            turn.wait(flood)
        for _ in range(20):
            await asyncio.sleep(0)
            found.append((turn.left, turn.share))

    asyncio.run(wait())
    assert min(left for left, _ in found) == RESERVED and {share for _, share in found} == {NEW_SHARE}


def test_turn_budget() -> None:
    """Connections that wait for their turn have it in order, some in each turn of the event loop."""
    order: list[tuple[int, int]] = []

    async def wait() -> None:
        turn, number = TurnBudget(asyncio.get_running_loop()), 0

        def called(i: int) -> None:
            order.append((number, i))
            turn.spend(CALLS_PER_TURN // 2)

        for i in range(6):
            turn.wait(lambda i=i: called(i))  # type: ignore[misc]  # mypy does not infer i
        while len(order) < 6:
            number += 1
            await asyncio.sleep(0)

    asyncio.run(wait())
    assert [i for _, i in order] == list(range(6))
    assert all(sum(n == number for n, _ in order) == 2 for number, _ in order)


def test_many_limits(listener: RespListener) -> None:
    """However many different limits clients send, few are kept; one in use keeps its state."""
    store = listener.app.store
    assert isinstance(store, MemoryStore)

    async def send() -> list[int]:
        client = await listener.connect()
        for start in range(0, 3 * throttle.MAX_LIMITS, 100):
            sent = [command("CL.THROTTLE", "k", i, 1, 1) for i in range(start + 1, start + 101)]
            client.writer.write(b"".join(sent) + command("CL.THROTTLE", "used", 99, 1, 100_000))
            found = [await client.reply() for _ in range(101)]
        client.writer.close()
        last: list[int] = found[-1]
        return last

    assert listener.run(send())[2] == 100 - 3 * throttle.MAX_LIMITS // 100
    assert len(store.tables) <= 2 * throttle.MAX_LIMITS + 20  # some are of the default rule
    assert len(store) == store.key_count.keys


def test_half_closed(resp_service: Service) -> None:
    """A client that ends its side of the stream gets the replies to what it has sent, as from netcat."""
    with RespSocket(resp_service) as client:
        client.send(command("PING") * 3 + b"PING\r\n")
        client.socket.shutdown(socket.SHUT_WR)
        assert client.replies() == ["PONG"] * 4


def test_limits_of_a_shared_store(tmp_path: Path) -> None:
    """On a shared store, where each limit is a file, there is a bound with an error of its own."""
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    listener = RespListener(tmp_path, SharedStore(f"shared://{folder}", max_keys=10))

    async def send() -> list[object]:
        client = await listener.connect()
        found = [await client.ask("CL.THROTTLE", "k", i, 1, 1) for i in range(throttle.MAX_SHARED_LIMITS + 1)]
        found.append(await client.ask("CL.THROTTLE", "k", 0, 1, 100_000, 0))
        found.append(await client.ask("CL.THROTTLE", "other", 0, 1, 1))
        client.writer.close()
        return found

    try:
        *made, over, another, known = listener.run(send())
    finally:
        listener.close()
    assert [one[0] for one in made] == [0] * throttle.MAX_SHARED_LIMITS  # type: ignore[index]  # five integers
    assert "64 different limits" in str(over) and "64 different limits" in str(another)
    assert known == [0, 1, 0, -1, 1]
