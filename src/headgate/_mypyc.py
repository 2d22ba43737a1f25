"""Hints to the compiler that mean nothing to plain Python, so that the library needs nothing to run but Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_: Any) -> Callable[[T], T]:
        return lambda cls: cls
