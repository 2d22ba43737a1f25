r"""Commands from bytes, and replies as bytes, in RESP2 and RESP3.

A command is an array of bulk strings, or a line of words as typed into telnet.

Bytes are split at line ends first: a command whose words have none inside, which is nearly every command, is then two
slices of a list and a comparison of lengths. `_words` is the law, for words that contain line ends and for bytes that
have not all come.

Bounds: `MAX_WORDS` words of `MAX_COMMAND` bytes together. Everything else that Redis replies may be, integers or nested
arrays, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_WORDS = 64
MAX_COMMAND = 16_384  # bytes

Command = list[bytes]

_COUNTS = {b"*%d" % count: count for count in range(1, MAX_WORDS + 1)}
_LENGTHS = {b"$%d" % length: length for length in range(513)}  # of words that are recognised at once
_NOT_INLINE = b"$:+-%~_#,(!=>|"  # how the types of a reply begin
_FOREIGN = (b"POST", b"HOST:")  # a browser was made to send HTTP here


class ProtocolViolation(Exception):
    """The bytes are no command; the connection cannot go on."""


class Incomplete(Exception):
    """The command has not all come; at least `more` bytes are missing."""

    def __init__(self, more: int) -> None:
        super().__init__(more)
        self.more = more


class Parsed:
    """The complete commands of some bytes, the bytes that follow, and what was wrong with them if they are refused."""

    __slots__ = ("commands", "more", "refused", "rest")

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.rest = b""
        self.more = 1  # bytes that must come before it is worth to look again
        self.refused = ""


def parse(data: bytes) -> Parsed:
    """All commands in *data*. Never raises."""
    found = Parsed()
    commands = found.commands
    lines = data.split(b"\r\n")
    last = len(lines) - 1  # what follows the last line end, so not known to be complete
    at = 0
    try:
        while at < last:
            count = _COUNTS.get(lines[at])
            if count is not None:
                end = at + 1 + 2 * count
                words = lines[at + 2 : end : 2]
                if end <= last and list(map(len, words)) == list(map(_LENGTHS.get, lines[at + 1 : end : 2])):
                    commands.append(words)
                    at = end
                else:
                    words, end = _words(lines, at + 1, count)
                    commands.append(words)
                    at = end
            else:
                at = _line(lines, at, commands)
                last = len(lines) - 1
        tail = lines[last]
        if tail and at == last:
            if tail[:1] != b"*" and b"\n" in tail:  # lines of a client that ends them with a line feed alone
                *complete, tail = tail.split(b"\n")
                for line in complete:
                    _inline(line, commands)
            elif tail[0] in _NOT_INLINE:
                _refuse_type(tail)
            elif tail[:1] == b"*" and (len(tail) > 20 or b"\n" in tail):
                raise ProtocolViolation("invalid multibulk length")
            found.rest = tail
    except Incomplete as error:
        found.rest = b"\r\n".join(lines[at:])
        found.more = error.more
    except ProtocolViolation as error:
        found.refused = str(error)
        return found
    if len(found.rest) + found.more > MAX_COMMAND:
        found.refused = f"a command has at most {MAX_COMMAND} bytes"
    return found


def _words(lines: list[bytes], at: int, count: int) -> tuple[Command, int]:
    """The *count* words whose first length is in line *at*, and the line behind them."""
    words: Command = []
    last, total = len(lines) - 1, 0
    for _ in range(count):
        if at == last and not lines[at]:
            raise Incomplete(4)
        if lines[at][:1] != b"$":
            raise ProtocolViolation(f"expected '$', got {_shown(lines[at][:1])}")
        if at == last:
            if len(lines[at]) > 20:
                raise ProtocolViolation("invalid bulk length")
            raise Incomplete(1)
        size = _length(lines[at][1:])
        total += size
        if total > MAX_COMMAND:
            raise ProtocolViolation(f"a command has at most {MAX_COMMAND} bytes")
        at += 1
        start, got = at, len(lines[at])
        while got < size and at < last:  # the line end belongs to the word
            at += 1
            got += 2 + len(lines[at])
        if at == last:
            if got < size or (got - size < 2 and lines[at].endswith(b"\r"[: got - size])):
                raise Incomplete(max(size + 2 - got, 1))
            raise ProtocolViolation("expected a line end behind a bulk string")
        if got != size:
            raise ProtocolViolation("expected a line end behind a bulk string")
        at += 1
        words.append(b"\r\n".join(lines[start:at]))
    return words, at


def _line(lines: list[bytes], at: int, commands: list[Command]) -> int:
    """Take line *at*, which starts no command of a known number of words; returns the next line."""
    line = lines[at]
    if line[:1] == b"*":
        if line in (b"*0", b"*-1"):  # Redis ignores them too
            return at + 1
        if not line[1:].isdigit() or len(line) > 20:
            raise ProtocolViolation("invalid multibulk length")
        count = int(line[1:])
        if count > MAX_WORDS:
            raise ProtocolViolation(f"invalid multibulk length: a command has at most {MAX_WORDS} words")
        lines[at] = b"*%d" % count  # it had zeros in front
        return at if count else at + 1
    if b"\n" in line:
        lines[at : at + 1] = line.split(b"\n")
        return at
    _inline(line, commands)
    return at + 1


def _inline(line: bytes, commands: list[Command]) -> None:
    words = line.split()
    if not words:
        return
    if words[0][0] in _NOT_INLINE:
        _refuse_type(words[0])
    if words[0].upper() in _FOREIGN:
        raise ProtocolViolation("this is HTTP; the HTTP API has another port")
    if len(words) > MAX_WORDS:
        raise ProtocolViolation(f"a command has at most {MAX_WORDS} words")
    commands.append(words)


def _refuse_type(line: bytes) -> None:
    raise ProtocolViolation(f"expected an array of bulk strings, got {_shown(line[:1])}")


def _length(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise ProtocolViolation("invalid bulk length")
    return int(text)


def _shown(first: bytes) -> str:
    return repr(first.decode(errors="replace")) if first else "an empty line"


# --------------------------------------------------------------------------------------------------------- replies

MAX_ERROR = 300  # characters

Value = bytes | str | int | None | list["Value"] | dict[str, "Value"]

OK = b"+OK\r\n"
NOT_AUTHENTICATED = b"-NOAUTH Authentication required.\r\n"


def error(text: str, code: str = "ERR") -> bytes:
    """An error; it is one line, whatever *text* quotes."""
    line = " ".join(text[:MAX_ERROR].split())
    return f"-{code} {line}\r\n".encode(errors="replace")


def integers(values: Iterable[int]) -> bytes:
    """An array of integers."""
    shown = [b":%d\r\n" % value for value in values]
    return b"*%d\r\n" % len(shown) + b"".join(shown)


def encode(value: Value, version: int) -> bytes:
    """Any other value; a dict is a map in RESP3, and a flat array of names and values in RESP2."""
    if value is None:
        return b"_\r\n" if version == 3 else b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(encode(one, version) for one in value)
    if isinstance(value, dict):
        head = b"%%%d\r\n" % len(value) if version == 3 else b"*%d\r\n" % (2 * len(value))
        return head + b"".join(encode(name, version) + encode(one, version) for name, one in value.items())
    raw = value.encode() if isinstance(value, str) else value
    return b"$%d\r\n%s\r\n" % (len(raw), raw)
