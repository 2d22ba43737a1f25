"""What compiled modules need of mypyc, in a form that plain Python runs too, so that nothing but Python is required."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_: Any) -> Callable[[T], T]:
        return lambda cls: cls


def set_doc(cls: type, text: str) -> None:
    """Give *cls* a docstring where mypyc has dropped it, or has put a placeholder in its place."""
    if not cls.__doc__ or cls.__doc__.startswith("mypyc"):
        cls.__doc__ = text
