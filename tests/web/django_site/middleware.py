"""Middleware of the tests."""

from __future__ import annotations

from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpResponse
from django.utils.decorators import sync_and_async_middleware


class Closed:
    """Answers every request itself."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> HttpResponse:
        return HttpResponse("closed", status=503)


@sync_and_async_middleware
def broken(get_response: Any) -> Any:
    """Makes every answer of a view a 500."""
    if iscoroutinefunction(get_response):

        async def on_loop(request: Any) -> Any:
            await get_response(request)
            return HttpResponse("broken", status=500)

        return on_loop

    def in_thread(request: Any) -> Any:
        get_response(request)
        return HttpResponse("broken", status=500)

    return in_thread
