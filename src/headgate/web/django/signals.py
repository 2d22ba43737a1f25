"""`rate_limited` is sent with a `request` and a `decision` when a limit refuses, also one with ``block=False``."""

from __future__ import annotations

from django.dispatch import Signal

rate_limited = Signal()
