"""What compiled modules need of mypyc, in a form that plain Python runs too, so that nothing but Python is required."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

T = TypeVar("T")

# Not `sys._is_gil_enabled()`: a free-threaded Python holds a lock for a moment while it imports compiled modules.
FREE_THREADED: Final = "free-threading build" in sys.version

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_: Any) -> Callable[[T], T]:
        return lambda cls: cls


def set_doc(cls: type, text: str) -> None:
    """Give *cls* a docstring where mypyc has dropped it, or has put a placeholder in its place."""
    if not cls.__doc__ or cls.__doc__.startswith("mypyc"):
        cls.__doc__ = text
