"""Name the test that opened a socket which a garbage collection finds open, and the lines that opened it.

Such a socket fails the test in which it is found (`filterwarnings = error`): the collector may come to it tests later.
So `tests/conftest.py` collects garbage after each module, and the error says whose socket it is.

A client of redis-py that a test made for itself is left out: many tests leave those to the collector, which finds the
client or its socket first, as chance has it. The connections that headgate opens by redis-py are not left out.
"""

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import redis

import headgate

OURS, REDIS_PY = (str(Path(str(package.__file__)).parent) + os.sep for package in (headgate, redis))
SHOWN = 20  # calls, from that which made the socket outwards

Line = tuple[str, int, str]  # a file, a line, a function

# By the id of the socket: weak references to it are gone before its finalizer runs. A new socket replaces an old one.
_opened: dict[int, tuple[str, str, list[Line]]] = {}


def note_openers() -> None:
    """Remember of every socket which test opened it, and where; an error of its finalizer gets that as a note."""
    make, report = socket.socket.__init__, sys.unraisablehook

    def make_and_note(self: socket.socket, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        _opened[id(self)] = test, threading.current_thread().name, _calls()

    def report_with_opener(error: "sys.UnraisableHookArgs") -> None:
        if isinstance(error.object, socket.socket) and error.exc_value is not None:
            if is_of_a_tests_client(error.object):
                return
            error.exc_value.add_note(opener(error.object))
        report(error)

    socket.socket.__init__ = make_and_note  # type: ignore[method-assign]  # there is no other place to learn of all
    sys.unraisablehook = report_with_opener


def is_of_a_tests_client(found: socket.socket) -> bool:
    """Whether redis-py opened the socket *found*, and nothing of headgate called it."""
    paths = [path for path, _, _ in _opened.get(id(found), ("", "", []))[2]]
    return any(path.startswith(REDIS_PY) for path in paths) and not any(path.startswith(OURS) for path in paths)


def opener(found: socket.socket) -> str:
    """Which test opened the socket *found*, and where."""
    if id(found) not in _opened:
        return "opened before the tests began"
    test, thread, calls = _opened[id(found)]
    lines = [f"  {path}:{line} in {function}" for path, line, function in calls[:SHOWN]]
    return "\n".join([f"opened in {test}, by the thread {thread!r}, at", *lines])


def _calls() -> list[Line]:
    """The calls that led here, the latest first, without those of this file."""
    frame, found = sys._getframe(2), list[Line]()
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]  # None is the end
    return found
