"""LLM clients inside the limits of a server that enforces them: the real SDKs, streams, broken streams, headers."""

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from time import process_time
from typing import Any

import httpx
import pytest

from headgate import AsyncBudget, Budget, RateLimited, StoreUnavailable
from headgate.clients.llm import AsyncBudgetTransport, BudgetTransport
from headgate.clients.usage import (
    OutputQuantile,
    StreamReader,
    TokenUsage,
    count_characters,
    output_limit,
    pauses_in,
    usage_in,
)
from headgate.testing import ManualClock
from tests.support.llm_fleet import run_fleet
from tests.support.llm_server import LLMServer
from tests.support.servers import Server

ROOT = Path(__file__).parent.parent.parent
QUOTAS = {"requests": "100/30d", "tokens": "100000/30d"}
HELLO = [{"role": "user", "content": "hello, who are you"}]  # 18 characters: 5 tokens


def charged(budget: Budget) -> dict[str, int]:
    left = budget.remaining("default")
    return {"requests": 100 - int(left["requests"]), "tokens": 100_000 - int(left["tokens"])}


SDKS = """
import sys
import anthropic, httpx, openai
try:
    import httpx2  # as the newer of these SDKs use
except ImportError:
    httpx2 = httpx
from headgate import Budget
from headgate.clients.llm import BudgetTransport
budget = Budget(requests="100/30d", tokens="100000/30d")
client = httpx.Client(transport=BudgetTransport(budget))
hello = [{"role": "user", "content": "hello, who are you"}]

def show():
    left = budget.remaining("default")
    print(100 - left["requests"], 100000 - left["tokens"], flush=True)

gpt = openai.OpenAI(api_key="k", base_url=sys.argv[1] + "/v1", http_client=client)
answer = gpt.chat.completions.create(model="m", messages=hello, max_tokens=100)
assert answer.usage.completion_tokens == 50
show()
words = 0
for chunk in gpt.chat.completions.create(model="m", messages=hello, max_tokens=100, stream=True):
    words += sum(len(choice.delta.content or "") // 4 for choice in chunk.choices)
assert words == 50
show()
other = httpx2.Client(transport=BudgetTransport(budget))
claude = anthropic.Anthropic(api_key="k", base_url=sys.argv[1], http_client=other)
assert claude.messages.create(model="c", messages=hello, max_tokens=60).usage.output_tokens == 30
show()
with claude.messages.stream(model="c", messages=hello, max_tokens=60) as stream:
    assert len("".join(stream.text_stream)) == 4 * 30
show()
budget.pause("default", 3600.0)
fast = gpt.with_options(max_retries=0)
fast._client._transport._timeout = 0
try:
    fast.chat.completions.create(model="m", messages=hello, max_tokens=100)
except openai.RateLimitError as error:
    print(error.response.headers["retry-after-ms"] > "0")
"""


@pytest.mark.server
def test_the_real_sdks() -> None:
    """openai and anthropic work unchanged; each call costs its usage; what the budget refuses is their own error."""
    with LLMServer(1000, 1_000_000, 60) as server:
        command = [sys.executable, "-c", SDKS, server.url]
        said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert said.stdout.splitlines() == ["1 55", "2 110", "3 145", "4 180", "True"], said.stderr


@pytest.mark.server
async def test_async_and_broken_streams() -> None:
    """A stream that is broken off is settled: by what may have been made of it, and never twice."""
    budget = AsyncBudget(requests="100/30d", input="1000/30d", output="1000/30d")
    body = {"model": "m", "messages": HELLO, "max_tokens": 400, "stream": True}
    with LLMServer(1000, 1_000_000, 60, pause=0.001) as server:
        url = server.url + "/v1/chat/completions"
        async with httpx.AsyncClient(transport=AsyncBudgetTransport(budget)) as client:
            answer = await client.post(url, json=body)
            assert answer.text.endswith("[DONE]\n\n")
            assert await budget.remaining("default") == {"requests": 99, "input": 995, "output": 800}
            async with client.stream("POST", url, json=body) as response:
                async for _ in response.aiter_lines():
                    break
                held = await budget.remaining("default")
                assert held == {"requests": 98, "input": 990, "output": 400}
            assert await budget.remaining("default") == {"requests": 98, "input": 990, "output": 600}
    assert await budget.unsettled() == []


@pytest.mark.server
def test_what_is_not_sent_costs_nothing(redis_server: Server) -> None:
    """A server that cannot be reached costs nothing; what a server refuses costs a request, and stops all processes."""
    budget = Budget(requests="100/30d", tokens="100000/30d", store=redis_server.url)
    body = {"model": "m", "messages": HELLO, "max_tokens": 10}
    with LLMServer(1, 1000, 3600) as server, httpx.Client(transport=BudgetTransport(budget, timeout=0)) as client:
        with pytest.raises(httpx.ConnectError):
            client.post("http://127.0.0.1:9/v1/chat/completions", json=body)
        assert charged(budget) == {"requests": 0, "tokens": 0}
        url = server.url + "/v1/chat/completions"
        assert client.post(url, json=body).status_code == 200
        assert charged(budget) == {"requests": 1, "tokens": 10}
        assert client.post(url, json=body).status_code == 429, "the server's"
        elsewhere = Budget(requests="100/30d", tokens="100000/30d", store=redis_server.url)
        assert elsewhere.remaining("default") == {"requests": 0, "tokens": 0}
        ours = client.post(url, json=body)
        assert ours.status_code == 429 and float(ours.headers["retry-after"]) > 3500
        assert "headgate" in ours.json()["error"]["message"] and len(server.refusals) == 1
        assert client.get(server.url).status_code == 501, "only calls that cost something are counted"


@pytest.mark.xdist_group("budget-processes")
@pytest.mark.server
def test_a_fleet(redis_server: Server) -> None:
    """Processes that call as fast as they may are not refused. `make soak` measures what they use."""
    outcome = run_fleet(redis_server.url, processes=2, seconds=3.0, period=3.0, callers=8)
    assert outcome.served and outcome.refused_late <= outcome.served / 100, outcome


def test_usage() -> None:
    """Both formats, bodies and events; text without usage is counted by its characters."""
    assert usage_in({"usage": {"prompt_tokens": 5, "completion_tokens": 7}}) == TokenUsage(5, 7)
    assert usage_in({"usage": {"input_tokens": 5, "cache_read_input_tokens": 2, "output_tokens": 7}}) == TokenUsage(
        7, 7
    )
    assert usage_in({"type": "response.completed", "response": {"usage": {"input_tokens": 1, "output_tokens": 2}}}) == (
        1,
        2,
    )
    assert usage_in({"usage": None}) is None and usage_in({}) is None
    assert usage_in({"usage": {"prompt_tokens": 5, "completion_tokens": -7}}) is None, "it cannot be true"
    assert usage_in({"usage": {"prompt_tokens": 5.0, "completion_tokens": 7.0}}) == TokenUsage(5, 7)
    assert usage_in({"usage": {"prompt_tokens": "5", "completion_tokens": None}}) is None, "it says nothing"
    reader = StreamReader(events=True)
    for piece in (
        b'data: {"choices": [{"delta": {"con',
        b'tent": "four"}}]}\n\ndata: [DONE',
        b"]\n\n",
        b"garbage\n\xff",
    ):
        reader.feed(piece)
    reader.close()
    assert reader.usage is None and reader.output_so_far == 1


def test_long_answers() -> None:
    """What is no event is kept in pieces until the end: ten times as much takes ten times as long, not a hundred."""
    begun, piece = process_time(), b"x" * 65_536
    reader = StreamReader(events=False)
    for _ in range(1000):
        reader.feed(piece)
    reader.close()
    assert process_time() - begun < 1 and reader.usage is None


BODY = {"model": "m", "messages": HELLO, "max_tokens": 10}
JSON, EVENTS = {"content-type": "application/json"}, {"content-type": "Text/Event-Stream; charset=utf-8"}
ANSWERS: list[tuple[dict[str, str], bytes, int]] = [  # and the tokens that are charged; 15 are estimated
    (JSON, b'{"usage": {"prompt_tokens": 5, "completion_tokens": 7}}', 12),
    (JSON, b'{"usage": {"prompt_tokens": -5, "completion_tokens": -7}}', 15),
    (JSON, b'{"usage": {"prompt_tokens": 5, "completion_tokens": 100000000000000000000000}}', 1_000_000_000),
    (JSON, b'{"usage": {"prompt_tokens": "5", "completion_tokens": []}}', 15),
    (JSON, b"[" * 100_000, 15),
    (JSON, b'{"a":' * 100_000, 15),
    (JSON, b"<html>\xff", 15),
    (JSON, b"", 15),
    (EVENTS, b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}\n\n', 12),
    (EVENTS, b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": -7}}\r\n\r\n', 15),
    (EVENTS, b"data: " + b"[" * 100_000 + b"\n\n", 15),
    (EVENTS, b'data: {"delta": ' + b"[" * 900 + b'"text"' + b"]" * 900 + b"}\n\n", 15),
]


@pytest.mark.parametrize("headers, body, tokens", ANSWERS, ids=range(len(ANSWERS)))
def test_what_servers_say(headers: dict[str, str], body: bytes, tokens: int) -> None:
    """An answer that is malformed, or lies, reaches the caller as it is; its call is settled."""
    server = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, content=body))
    budget = Budget(tokens="1000000000/30d", clock=ManualClock())
    with httpx.Client(transport=BudgetTransport(budget, transport=server)) as client:
        assert client.post("http://llm/v1/chat/completions", json=BODY).content == body
    assert budget.unsettled() == [] and 1_000_000_000 - int(budget.remaining("default")["tokens"]) == tokens

    async def ask() -> None:
        waits = AsyncBudget(tokens="1000000000/30d", clock=ManualClock())
        async with httpx.AsyncClient(transport=AsyncBudgetTransport(waits, transport=server)) as client:
            assert (await client.post("http://llm/v1/chat/completions", json=BODY)).content == body
        assert await waits.unsettled() == [] and await waits.remaining("default") == budget.remaining("default")

    asyncio.run(ask())


def test_a_guess_of_millions() -> None:
    """A call that allows any output, answered without usage, costs no more than could be reserved for it."""
    server = httpx.MockTransport(lambda request: httpx.Response(200, headers=JSON, content=b"{}"))
    budget = Budget(tokens="1000/30d", name="millions")
    with httpx.Client(transport=BudgetTransport(budget, transport=server)) as client:
        assert client.post("http://llm/", json={**BODY, "max_tokens": 10**12}).status_code == 200
    assert budget.unsettled() == []
    with pytest.raises(RateLimited) as refused:
        budget.reserve("default", timeout=0, tokens=1)
    assert refused.value.retry_after < 20_000, "the guess was bounded; a token comes in 2,592 seconds"


def test_models_are_forgotten() -> None:
    """Names of models may come from users: what is remembered of them is bounded, and a flood keeps the first."""
    answer = b'{"usage": {"prompt_tokens": 5, "completion_tokens": 7}}'
    server = httpx.MockTransport(lambda request: httpx.Response(200, headers=JSON, content=answer))
    budget = Budget(output="1000000/30d", clock=ManualClock())
    transport = BudgetTransport(budget, transport=server)
    for number in range(1100):
        body = b'{"model": "%d"}' % number
        transport.handle_request(httpx.Request("POST", "http://llm/", content=body)).close()
    estimates = [transport._estimate({"model": model}).output for model in ("0", "998", "1050", "unseen")]
    assert estimates == [7, 7, 500, 500] and len(transport._outputs) <= 1000


class Closing(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A refusal's body that notes that it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.server
def test_a_pause_that_fails(redis_server: Server) -> None:
    """If the store is gone when the server has refused, its answer is closed, and the call is settled."""
    body = Closing()

    def refuse(request: httpx.Request) -> httpx.Response:
        redis_server.kill()
        return httpx.Response(429, headers={"retry-after": "5"}, stream=body)

    budget = Budget(tokens="1000/30d", store=redis_server.url, on_store_error="raise")
    client = httpx.Client(transport=BudgetTransport(budget, transport=httpx.MockTransport(refuse)))
    with client, pytest.raises(StoreUnavailable):
        client.post("http://llm/", json=BODY)
    redis_server.restart()
    assert body.closed == 1 and budget.unsettled() == []

    async def ask() -> None:
        waits = AsyncBudget(tokens="1000/30d", store=redis_server.url, on_store_error="raise")
        transport = AsyncBudgetTransport(waits, transport=httpx.MockTransport(refuse))
        async with httpx.AsyncClient(transport=transport) as client:
            with pytest.raises(StoreUnavailable):
                await client.post("http://llm/", json=BODY)
        assert body.closed == 2 and await waits.unsettled() == []

    asyncio.run(ask())
    redis_server.restart()


def test_estimates() -> None:
    """Characters of all text in fours; the output by the request's limit; a high quantile of what was seen."""
    assert count_characters({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 9}]}]}) == 3
    assert count_characters({}) == 1
    deep: Any = "x" * 9
    for _ in range(5000):
        deep = [deep]
    assert count_characters({"input": deep}) == 3
    assert output_limit({"max_tokens": 10, "n": 3}) == 30 and output_limit({}) is None
    quantile = OutputQuantile()
    assert quantile.estimate(500) == 500
    for tokens in range(1000):
        quantile.add(tokens)
    assert quantile.estimate(500) == 979


NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEADERS: list[tuple[int, dict[str, str], list[tuple[str, float]]]] = [
    (200, {}, []),
    (429, {"retry-after-ms": "1500", "retry-after": "9"}, [("", 1.5)]),
    (429, {"Retry-After": "2.5"}, [("", 2.5)]),
    (429, {"Retry-After": format_datetime(NOW + timedelta(seconds=50), usegmt=True)}, [("", 50.0)]),
    (429, {"Retry-After": format_datetime(NOW - timedelta(days=1), usegmt=True)}, [("", 0.0)]),
    (429, {"Retry-After": "9" * 400}, [("", 3600.0)]),
    (429, {"retry-after-ms": "9" * 400}, [("", 3600.0)]),
    (429, {"retry-after-ms": "-5", "retry-after": "3"}, [("", 3.0)]),
    (429, {"retry-after": "-5"}, []),
    (200, {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, [("tokens", 0.0)]),
    (429, {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, [("tokens", 360.0)]),
    (429, {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "120ms"}, [("requests", 0.12)]),
    (
        429,
        {
            "anthropic-ratelimit-output-tokens-remaining": "0",
            "anthropic-ratelimit-output-tokens-reset": (NOW + timedelta(seconds=20)).isoformat(),
            "anthropic-ratelimit-input-tokens-remaining": "5",
        },
        [("output", 20.0)],
    ),
    (429, {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "soon"}, [("tokens", 0.0)]),
]


@pytest.mark.parametrize("status, headers, expected", HEADERS)
def test_headers(status: int, headers: dict[str, str], expected: list[tuple[str, float]]) -> None:
    """What servers say about their limits, in their forms."""
    assert pauses_in(status, headers, NOW) == expected


def test_bad_arguments() -> None:
    """The error says what would be right."""
    budget: Any = Budget(usd="5/day")
    with pytest.raises(ValueError, match="needs one of these amounts: requests, tokens, input, output"):
        BudgetTransport(budget)
    with pytest.raises(TypeError, match="must be of type AsyncBudget, got Budget"):
        AsyncBudgetTransport(budget)
