"""What the answers of LLM servers say: tokens that were used, and when the server has more.

Knows the formats of OpenAI (chat completions, responses, embeddings), of Anthropic, and of the many servers that speak
one of the two. Reads whole bodies and streams of server-sent events, whose last events have the usage.
"""

from __future__ import annotations

import json
import re
from bisect import insort
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from headgate.coordination.feedback import retry_after

CHARACTERS_PER_TOKEN = 4
REMEMBERED = 200  # answers whose output the quantile is taken of
QUANTILE = 0.9
LONGEST = 3600.0  # seconds of a pause; a longer one is taken for a mistake of the server
MAX_LINE = 1 << 20  # bytes of a line of a stream; a longer one is not read

_INPUTS = ("prompt_tokens", "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_OUTPUTS = ("completion_tokens", "output_tokens")
_OUTPUT_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_NUMBER = r"\d+(\.\d+)?"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class TokenUsage(NamedTuple):
    """Tokens of a call."""

    input: int
    output: int

    @property
    def total(self) -> int:
        return self.input + self.output


class OutputQuantile:
    """How many tokens the answers of a model had: a high quantile of the last ones, for estimates."""

    def __init__(self) -> None:
        self._recent: list[int] = []
        self._sorted: list[int] = []

    def add(self, tokens: int) -> None:
        self._recent.append(tokens)
        insort(self._sorted, tokens)
        if len(self._recent) > REMEMBERED:
            self._sorted.remove(self._recent.pop(0))

    def estimate(self, otherwise: int) -> int:
        return self._sorted[int(QUANTILE * (len(self._sorted) - 1))] if self._sorted else otherwise


def read_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request or an answer; empty if it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def count_characters(body: Mapping[str, Any]) -> int:
    """An estimate of the input tokens: a fourth of the characters of all text in the request, rounded up."""
    prompts = [body.get(name) for name in ("messages", "input", "prompt", "system", "instructions", "tools")]
    return -(-sum(map(_characters, prompts)) // CHARACTERS_PER_TOKEN) or 1


def output_limit(body: Mapping[str, Any]) -> int | None:
    """The most output tokens that the request allows, if it says so."""
    found = [body[name] for name in _OUTPUT_LIMITS if isinstance(body.get(name), int)]
    return max(found[0] * max(_whole(body.get("n")), 1), 0) if found else None


def usage_in(answer: Mapping[str, Any]) -> TokenUsage | None:
    """The usage in an answer, or in an event of a stream; None if it has none, or one that cannot be true."""
    for part in (answer, answer.get("response"), answer.get("message")):
        usage = part.get("usage") if isinstance(part, Mapping) else None
        if isinstance(usage, Mapping):
            given = {name: usage[name] for name in (*_INPUTS, *_OUTPUTS) if usage.get(name) is not None}
            if not given or not all(map(_is_count, given.values())):
                return None
            prompt, sent, *cached = [int(given.get(name, 0)) for name in _INPUTS]
            completion, output = [int(given.get(name, 0)) for name in _OUTPUTS]
            return TokenUsage(prompt or sent + sum(cached), completion or output)
    return None


class StreamReader:
    """Reads usage from the bytes of an answer as they pass: server-sent events, or one JSON body."""

    def __init__(self, events: bool) -> None:
        self.usage: TokenUsage | None = None
        self.characters = 0  # of text in the events so far: what a broken stream is charged by
        self._events = events
        self._rest = b""
        self._body: list[bytes] = []  # in pieces: to join them as they come would copy a long answer again and again
        self._has_usage = True  # False: the body is no JSON object, such as audio, and is not kept

    def feed(self, data: bytes) -> None:
        if not self._events:
            self._keep(data)
            return
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._line(line.strip())
        if len(self._rest) > MAX_LINE:
            self._rest = b""

    def close(self) -> None:
        """Read what is left: of an answer that is one JSON body, all of it."""
        if self._events:
            self._line(self._rest.strip())
        else:
            self.usage = usage_in(read_body(b"".join(self._body)))
        self._rest, self._body = b"", []

    @property
    def output_so_far(self) -> int:
        """An estimate of the output tokens that have come."""
        return -(-self.characters // CHARACTERS_PER_TOKEN)

    def _keep(self, data: bytes) -> None:
        if not self._body:
            data = data.lstrip()
            self._has_usage = self._has_usage and data[:1] in (b"{", b"")
        if self._has_usage and data:
            self._body.append(data)

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        event = read_body(line[5:])
        found = usage_in(event)
        if found:  # Anthropic's first event has the input, and its last the output
            before = self.usage or TokenUsage(0, 0)
            self.usage = TokenUsage(max(found.input, before.input), max(found.output, before.output))
        self.characters += _characters([event.get("delta"), event.get("choices")])


def pauses_in(status: int, headers: Mapping[str, str], now: datetime) -> list[tuple[str, float]]:
    """What the server has no more of, and for how many seconds: requests, tokens, input, output, or '' for all.

    A refusal says when to come back. An answer that was served may say that nothing remains: that is a pause of 0
    seconds, as the amounts come back bit by bit.
    """
    lower = {str(name).lower(): str(value).strip() for name, value in headers.items()}
    refused, found = status in (429, 503, 529), []
    if refused and re.fullmatch(_NUMBER, lower.get("retry-after-ms", "")):
        found.append(("", min(float(lower["retry-after-ms"]) / 1000, LONGEST)))
    elif refused and (seconds := retry_after(lower, now.timestamp())) is not None:
        found.append(("", min(seconds, LONGEST)))
    for name, value in lower.items():
        if value == "0" and "ratelimit" in name and "remaining" in name:
            kind = next((kind for kind in ("input", "output", "tokens", "requests") if kind in name), "")
            reset = _reset(lower.get(name.replace("remaining", "reset"), ""), now)
            if not refused or not found:
                found.append((kind, min(reset, LONGEST) if refused else 0.0))
    return found


def _reset(text: str, now: datetime) -> float:
    """Seconds of ``6m0s``, ``1.5s``, ``20``, or until a time such as ``2026-01-01T00:00:00Z``."""
    if re.fullmatch(_NUMBER, text):
        return float(text)
    parts = _DURATION.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    try:
        return max((datetime.fromisoformat(text) - now).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return 0.0


def _is_count(value: object) -> bool:
    """Whether *value* is a number of tokens; some servers write 5.0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value % 1 == 0


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _characters(value: object) -> int:
    """The characters of all text in *value*, however deep it is nested."""
    count, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            count += len(part)
        elif isinstance(part, Mapping):
            left += [each for name, each in part.items() if name not in ("type", "role", "id")]
        elif isinstance(part, list | tuple):
            left += part
    return count
