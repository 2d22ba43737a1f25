"""What the URLs of servers have in common: numbers behind the question mark, and passwords that no message shows.

A URL gives its settings as text. `number` reads them; `seconds`, `count` and `count_from_zero` check them, and raise a
ValueError that says what would be right.
"""

from __future__ import annotations

import math
import re
from urllib.parse import unquote

# A check that takes longer is worth less than the answer of on_store_error.
TIMEOUT = 0.08  # seconds


def without_secrets(url: str) -> str:
    """*url* for a message: without its passwords, wherever in it they are."""
    plain, mark, query = re.sub(r"(?<=//).*@", "***@", url).partition("?")
    pairs = (pair.partition("=") for pair in query.split("&"))
    return plain + mark + "&".join(name + sign + ("***" if _secret(name) else value) for name, sign, value in pairs)


def _secret(name: str) -> bool:
    return "password" in unquote(name).lower()


def number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number of seconds, got {value!r:.40}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be more than 0 seconds, got {value!r}")
    return float(value)


def count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r:.40}")
    return value


def count_from_zero(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r:.40}")
    return value


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r:.40}")
    return value
