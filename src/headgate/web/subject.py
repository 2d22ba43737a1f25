"""Whose permits a limit spends, and the names that tell such subjects apart, the same in every process."""

from __future__ import annotations

import functools
import inspect
import re
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from headgate.keys import MAX_BYTES, digest
from headgate.web.exchange import Exchange

KeySource = str | Callable[[Any], Any]  # "address", "header:NAME", or a function of the request

HEADER = re.compile(r"header:\s*([A-Za-z0-9!#$%&'*+.^_`|~-]+)\s*", re.IGNORECASE)
PLACE_IN_MEMORY = re.compile(r"\bat 0x[0-9a-fA-F]{4}|\bid='\d{4}")  # of an object that has no text of its own
CONTAINERS = (bytes, bytearray, list, tuple, dict, set, frozenset)
DEPTH = 3  # how deep objects are looked into that a key function holds
MAX_SUBJECTS = 1000  # of one name, and MAX_NAMES of all: an application may make limits without end
MAX_NAMES = 10_000


class SetupError(ValueError):
    """Something that an application says about its limits cannot be right. Raised when it starts where possible."""


class Subject:
    """Whose permits a limit spends: a client's address, the value of a header, or what a function returns."""

    def __init__(self, source: KeySource) -> None:
        self.source = source
        self.header = ""
        if callable(source):
            if inspect.isgeneratorfunction(source) or inspect.isasyncgenfunction(source):
                raise SetupError(f"the key function {name_of(source)} has a yield; it must return the key")
            self.name = name_of(source)
        elif source == "address":
            self.name = "address"
        elif isinstance(source, str) and (found := HEADER.fullmatch(source)):
            self.header = found[1].lower()
            self.name = f"header:{self.header}"
        else:
            raise SetupError(
                f"key must be 'address', 'header:NAME', a function of the request or a list of them, got {source!r:.60}"
            )

    async def key(self, exchange: Exchange) -> str:
        """The key of *exchange*'s request. Raises `SetupError` if a function gives nothing: never a shared bucket."""
        if self.header:
            values = exchange.get_all(self.header)
            if values and (value := values[0].strip()):
                return _digest(value)  # it may be a secret, and of any length
            return exchange.address()  # a client without the header is still one client
        if not callable(self.source):
            return exchange.address()
        found = self.source(exchange.native)
        if inspect.isawaitable(found):
            found = await found
        return self.text(found)

    def text(self, found: object) -> str:
        """What a key function returned, as a key."""
        key = found if type(found) is str else key_text(found)
        if not key.strip():
            raise SetupError(
                f"the key function {self.name} returned {type(found).__name__} {found!r:.60}; it must give the text or "
                "number that names the client of every request. Use exempt_when= for requests without a limit, or "
                "return another key, such as the address"
            )
        if len(key) > MAX_BYTES // 4 or not key.isprintable():
            return _digest(key)
        return key

    def stored(self, key: str, address_key: str) -> set[str]:
        """The keys under which a client may be kept that is called *key*; *address_key*: if that is an address."""
        if callable(self.source):
            return {self.text(key)}
        addresses = {address_key} if len(key) <= MAX_BYTES // 4 and key.isprintable() else set()
        return {_digest(key), *addresses} if self.header else addresses


class SubjectNames:
    """Numbers the subjects of one scope that have one name but are different functions, in the order of their limits.

    They are told apart by their code and by what they hold. So limits with the same function share their state, also
    if the function is made again for each limit.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[tuple[object, str]]] = {}
        self._lock = threading.Lock()

    def tell_apart(self, subjects: Sequence[Subject], scope: str) -> None:
        """Change the names of *subjects*, which are those of one limit, where others of *scope* have them."""
        met: set[tuple[str, int]] = set()
        for subject in subjects:
            with self._lock:
                known = self._known.setdefault((scope, subject.name), [])
                if len(self._known) > MAX_NAMES:
                    del self._known[next(iter(self._known))]
                free = [i for i in range(len(known)) if (subject.name, i) not in met]
                number = self._number(subject.source, known, free)
            met.add((subject.name, number))
            subject.name += f"#{number + 1}" if number else ""

    def _number(self, source: object, known: list[tuple[object, str]], free: list[int]) -> int:
        """The place of *source* among the *known* key functions of one name; a new one if it is at none of the *free*.

        *free* are the places that no other subject of the same limit has.
        """
        for i in free:
            if known[i][0] is source:
                return i
        content = repr(_parts(source, DEPTH))
        for i in free:
            if known[i][1] == content:
                return i
        if len(known) < MAX_SUBJECTS:
            known.append((source, content))
            return len(known) - 1
        return len(known)


def name_of(source: Callable[..., Any]) -> str:
    """A name for a key function, the same in every process.

    Lambdas and functions inside of functions are told apart by their code and by the texts and numbers that they hold.
    """
    name = getattr(source, "__qualname__", type(source).__qualname__)
    if isinstance(source, functools.partial) or "<" in name:
        return f"{name}~{digest(repr(_parts(source)))[:8]}"
    return str(name)


def _parts(value: Any, depth: int = 0, around: tuple[Any, ...] = ()) -> Any:
    """What tells *value* apart from others. Without *depth* it does not change from one process to the next.

    *around*: the functions that hold it. A function may hold itself.
    """
    kind = type(value)  # `isinstance` would ask a lazy object for its class
    if value is None or issubclass(kind, str | int | bytes):
        return value
    if issubclass(kind, tuple):
        return [_parts(each, depth, around) for each in value]
    if kind is types.CodeType:
        return (value.co_code, value.co_names, _parts(value.co_consts))
    if issubclass(kind, functools.partial):
        keywords = tuple(sorted(value.keywords.items()))
        return [_parts(each, depth, around) for each in (value.func, value.args, keywords)]
    if kind is types.MethodType:
        function = _parts(value.__func__, depth, around)
        return (_parts(value.__self__, depth, around), function) if depth else function
    if kind is types.FunctionType and value not in around:
        held = tuple(cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
        more = (value.__module__, _parts(tuple((value.__kwdefaults__ or {}).items()))) if depth else ()
        own = (_parts(value.__code__), _parts(value.__defaults__), _parts(held, depth, (*around, value)))
        return (value.__qualname__, *own, *more)
    return _inside(value, depth - 1, around) if depth else kind.__qualname__


def _inside(value: Any, depth: int, around: tuple[Any, ...]) -> Any:
    """What tells an object apart from others: its text, or else its class and its attributes."""
    kind = type(value)
    try:
        text = repr(value)
    except Exception:  # an object that cannot be used yet when the application starts
        return kind.__qualname__
    if not PLACE_IN_MEMORY.search(text):
        return text
    try:
        held = object.__getattribute__(value, "__dict__").items()
    except AttributeError:
        return kind.__qualname__
    own = [pair for pair in held if not isinstance(getattr(kind, pair[0], None), functools.cached_property)]
    return (kind.__module__, kind.__qualname__, [(name, _parts(each, depth, around)) for name, each in own])


def key_text(found: object) -> str:
    """The text of what a key function returned; '' if it has none that stays the same."""
    kind = type(found)  # `isinstance` could ask a lazy object of Django for its class
    if found is None or kind is bool or callable(found):
        return ""
    if kind in CONTAINERS and all(each is None for each in found):  # type: ignore[attr-defined]  # it is one of them
        return ""  # the list of a header that was not sent: the same for all clients without it
    nameless = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    text = "" if nameless else repr(found) if kind is bytes else str(found)
    # an object without a text of its own would be another client each time
    return "" if PLACE_IN_MEMORY.search(text) and not issubclass(kind, str) else text


def _digest(text: str) -> str:
    return digest(text.encode(errors="backslashreplace").decode())  # servers decode what is no text to surrogates
