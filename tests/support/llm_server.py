"""An LLM server that enforces its limits, in the formats of OpenAI and Anthropic; it says `word` again and again.

A request is admitted if there is room for its input and for all output that it allows, as real servers do; when it
ends, what was not used goes back. Four characters are a token. Streams come in pieces of eight tokens.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from headgate.clients.usage import count_characters, output_limit

PIECE = 8  # tokens


class ServerBucket:
    """Tokens that refill, in plain floats: nothing of headgate is used to judge headgate."""

    def __init__(self, per_second: float, capacity: float) -> None:
        self.rate, self.capacity, self.level, self.at = per_second, capacity, capacity, time.monotonic()

    def refill(self) -> None:
        now = time.monotonic()
        self.level, self.at = min(self.level + (now - self.at) * self.rate, self.capacity), now


class LLMServer(ThreadingHTTPServer):
    """`with LLMServer(requests=500, tokens=100_000, period=60) as server`; `server.url`, and what it counted."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, requests: int, tokens: int, period: float, pause: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.buckets = {
            "requests": ServerBucket(requests / period, requests),
            "tokens": ServerBucket(tokens / period, tokens),
        }
        self.guard = threading.Lock()
        self.pause = pause  # seconds between two pieces
        self.began = time.monotonic()
        self.first = self.last = 0.0  # monotonic, of calls that were served
        self.used = 0  # tokens
        self.served = 0
        self.refusals: list[float] = []  # seconds since the beginning
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the test."""

    def admit(self, tokens: int) -> float:
        """Take a request and its tokens; else the seconds until there would be room."""
        with self.guard:
            asked = {"requests": 1, "tokens": tokens}
            for bucket in self.buckets.values():
                bucket.refill()
            waits = [(asked[name] - bucket.level) / bucket.rate for name, bucket in self.buckets.items()]
            if max(waits) > 0:
                self.refusals.append(time.monotonic() - self.began)
                return max(waits)
            for name, bucket in self.buckets.items():
                bucket.level -= asked[name]
            return 0.0

    def finish(self, reserved: int, used: int) -> None:
        with self.guard:
            bucket = self.buckets["tokens"]
            bucket.refill()
            bucket.level = min(bucket.level + reserved - used, bucket.capacity)
            self.used += used
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.served += 1


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: LLMServer

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        sent, most = count_characters(body), output_limit(body) or 100
        wait = self.server.admit(sent + most)
        if wait:
            self._answer(429, {"error": {"message": "slow down", "type": "rate_limit_error"}}, wait)
            return
        output, written = min(int(body.get("seed") or most // 2), most), 0
        anthropic = self.path.endswith("/messages")
        try:
            if body.get("stream"):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                if anthropic:
                    self._event(_message(sent, 1) | {"type": "message_start"})
                    self._event(
                        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
                    )
                while written < output:
                    piece = min(PIECE, output - written)
                    self._event(_delta(anthropic, "word" * piece))
                    written += piece
                    time.sleep(self.server.pause)
                if anthropic:
                    self._event({"type": "content_block_stop", "index": 0})
                    usage = {"output_tokens": output}
                    self._event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage})
                    self._event({"type": "message_stop"})
                else:
                    usage = {"prompt_tokens": sent, "completion_tokens": output, "total_tokens": sent + output}
                    self._event(_chunk([]) | {"usage": usage})
                    self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")
            else:
                written = output
                self._answer(200, _whole(anthropic, sent, output))
        finally:
            self.server.finish(sent + most, sent + written)

    def _answer(self, status: int, body: dict[str, Any], wait: float = 0.0) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if wait:
            self.send_header("retry-after-ms", f"{wait * 1000:.0f}")
        self.end_headers()
        self.wfile.write(data)

    def _event(self, event: dict[str, Any]) -> None:
        name = f"event: {event['type']}\n" if "type" in event else ""
        self._chunk(f"{name}data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


def _chunk(choices: list[Any]) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}


def _delta(anthropic: bool, text: str) -> dict[str, Any]:
    if anthropic:
        return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    return _chunk([{"index": 0, "delta": {"content": text}, "finish_reason": None}])


def _message(sent: int, output: int, text: str | None = None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "text", "text": text}]
    usage = {"input_tokens": sent, "output_tokens": output}
    message: dict[str, Any] = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": content,
        "usage": usage,
    }
    message |= {"stop_reason": None if text is None else "end_turn", "stop_sequence": None}
    return {"message": message}


def _whole(anthropic: bool, sent: int, output: int) -> dict[str, Any]:
    text = "word" * output
    if anthropic:
        message: dict[str, Any] = _message(sent, output, text)["message"]
        return message
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": sent, "completion_tokens": output, "total_tokens": sent + output}
    return {**_chunk([choice]), "object": "chat.completion", "usage": usage}
