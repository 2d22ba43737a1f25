"""The parser of the Redis protocol, without a connection: what is a command, and what never is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.service.resp.wire import MAX_COMMAND, MAX_WORDS, Parsed, parse
from tests.support.resp import command

words = st.lists(
    st.one_of(st.binary(max_size=12), st.sampled_from([b"\r\n", b"$3", b"*1\r\n", b"a\r", b"\nb"])),
    min_size=1,
    max_size=6,
)


def fed(pieces: list[bytes]) -> Parsed:
    """What the parser has found when the last piece has come, as a connection feeds it."""
    found, commands = Parsed(), []
    for piece in pieces:
        found = parse(found.rest + piece)
        commands += found.commands
    found.commands = commands
    return found


@given(st.lists(words, min_size=1, max_size=4), st.data())
def test_any_split(commands: list[list[bytes]], data: st.DataObject) -> None:
    """Commands of any bytes are found, wherever the stream is cut; a cut inside one loses nothing."""
    stream = b"".join(command(*one) for one in commands)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    found = fed(pieces)
    assert (found.commands, found.rest, found.refused) == (commands, b"", "")


@given(st.lists(words, min_size=1, max_size=2), st.data())
def test_missing_bytes(commands: list[list[bytes]], data: st.DataObject) -> None:
    """`more` is never more than what is missing."""
    stream = b"".join(command(*one) for one in commands)
    cut = data.draw(st.integers(0, len(stream)))
    found = parse(stream[:cut])
    assert not found.refused
    if found.rest:
        last = command(*commands[len(found.commands)])
        assert last.startswith(found.rest) and 1 <= found.more <= len(last) - len(found.rest)


@given(st.binary(max_size=60))
def test_garbage(data: bytes) -> None:
    """Any bytes are commands, the beginning of one, or refused; nothing is raised."""
    found = parse(data)
    assert all(found.commands) and len(found.rest) <= len(data)


@given(st.binary(max_size=20), st.sampled_from([b"*2\r\n$1\r\na\r\n", b"*1\r\n$2\r\n", b"PING\r\n", b"*1\r\n"]))
def test_garbage_inside(data: bytes, before: bytes) -> None:
    """The same behind the beginning of a command."""
    found = parse(before + data)
    assert all(found.commands)


@pytest.mark.parametrize(
    "data, why",
    [
        (b"*1\r\n*1\r\n", "expected '$', got '*'"),
        (b"*1\r\n:1\r\n", "expected '$', got ':'"),
        (b"*2\r\n$1\r\na\r\n\r\n", "expected '$', got an empty line"),
        (b"*1000000000\r\n", "at most 64 words"),
        (b"*%d\r\n" % (MAX_WORDS + 1), "at most 64 words"),
        (b"*" + b"9" * 30, "invalid multibulk length"),
        (b"*-5\r\n", "invalid multibulk length"),
        (b"*1x\r\n", "invalid multibulk length"),
        (b"*1\n$4\r\n", "invalid multibulk length"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$1x\r\n", "invalid bulk length"),
        (b"*1\r\n$" + b"1" * 30, "invalid bulk length"),
        (b"*1\r\n$%d\r\n" % (MAX_COMMAND + 1), "at most 16384 bytes"),
        (b"*2\r\n$9000\r\n" + b"a" * 9000 + b"\r\n$9000\r\n", "at most 16384 bytes"),
        (b"*1\r\n$4\r\nPINGxx\r\n", "expected a line end"),
        (b"*1\r\n$4\r\nPINGx", "expected a line end"),
        (b"*1\r\n$1\r\na\r\rb", "expected a line end"),
        (b"$4\r\nPING\r\n", "expected an array of bulk strings, got '$'"),
        (b"+OK\r\n", "expected an array of bulk strings, got '+'"),
        (b"%1\r\n", "expected an array of bulk strings, got '%'"),
        (b"x" * (MAX_COMMAND + 1), "at most 16384 bytes"),
        (b"a " * 100 + b"\r\n", "at most 64 words"),
        (b"POST / HTTP/1.1\r\n", "this is HTTP"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", "this is HTTP"),
    ],
)
def test_refused(data: bytes, why: str) -> None:
    """What is no command is refused with the reason; commands before it stand."""
    assert why in parse(data).refused
    found = parse(command("PING") + data)
    assert why in found.refused and found.commands[0] == [b"PING"]


def test_ignored() -> None:
    """Empty lines and empty arrays are no commands; a count may have zeros in front."""
    found = parse(b"\r\n*0\r\n*-1\r\n \r\n*001\r\n$4\r\nPING\r\n")
    assert (found.commands, found.rest, found.refused) == ([[b"PING"]], b"", "")


def test_largest() -> None:
    """A command may be just below the bound, also in pieces."""
    whole = command("ECHO", b"\r\n" * 8100)
    assert fed([whole[i : i + 100] for i in range(0, len(whole), 100)]).commands == [[b"ECHO", b"\r\n" * 8100]]
