"""`flask headgate` and `quart headgate`: what an application limits, what a client has left, and to forget a client.

The routes of the application tell which limits there are, so the commands work in a process that has served nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from headgate.stores.base import is_per_process
from headgate.web.limit import Limit
from headgate.web.limiters import ScopedLimiter
from headgate.web.startup import UNSEEN

if TYPE_CHECKING:
    from headgate.web.views import ViewRateLimits


def commands(app: Any) -> click.Group:
    """`flask headgate rules`, `show KEY` and `reset KEY`, for all limits of *app*."""
    group = click.Group("headgate", help="Rate limits: what is limited, and for whom.")
    everything: list[ViewRateLimits[Any]] = app.extensions["headgate"]

    @group.command("rules")
    def rules() -> None:
        """List the routes and their limits."""
        rows = [("ROUTE", "LIMIT", "KEY", "SCOPE")]
        for limits in everything:
            plans = sorted(limits.declare(), key=lambda plan: plan.route.split()[1:])
            for plan in [*plans, limits.unmatched]:
                route = plan.route or "(no route)"
                for limit in plan.limits:
                    keys = " and ".join(subject.name for subject in limit.subjects)
                    rows.append((route, quota_text(limit), keys, limit.scope or route))
                if not plan.limits:
                    rows.append((route, "none", "", ""))
        _print_table(rows)

    @group.command("show")
    @click.argument("key")
    def show(key: str) -> None:
        """Show what a client has left. KEY: its address, the value of its header, or what a key function gives."""
        _check_stores(everything)
        rows = [("SCOPE", "KEY", "LIMIT", "REMAINING", "RESET AFTER")]
        for limiter, keys in _states(everything, key):
            if not keys:
                continue  # what is no address has no state where addresses count
            made = min([limiter.blocking.peek(stored, 0) for stored in keys], key=lambda made: made.remaining)
            remaining = "the store is down" if made.degraded else f"{made.remaining} of {made.limit}"
            quotas = ", ".join(str(quota) for quota in limiter.rule.quotas)
            rows.append((limiter.scope, limiter.subject.name, quotas, remaining, f"{made.reset_after:.0f} s"))
        _print_table(rows)

    @group.command("reset")
    @click.argument("key")
    def reset(key: str) -> None:
        """Forget a client in every limit. KEY: its address, the value of its header, or what a key function gives."""
        _check_stores(everything)
        states = [(limiter, keys) for limiter, keys in _states(everything, key) if keys]
        if not all([limiter.blocking.reset(stored) for limiter, keys in states for stored in keys]):
            raise click.ClickException("the store did not answer")
        click.echo(f"{key} is forgotten in {len(states)} limits")

    return group


def quota_text(limit: Limit) -> str:
    """The quotas of *limit*, or the name of the function that gives them."""
    if limit.rule is None:
        return f"{getattr(limit.quota_function, '__qualname__', 'a function')}()"
    return ", ".join(str(quota) for quota in limit.rule.quotas)


def _check_stores(everything: list[ViewRateLimits[Any]]) -> None:
    """Raise if a command would answer from memory of its own."""
    for limits in everything:
        if is_per_process(limits.store):
            raise click.ClickException(UNSEEN.format("the store"))


def _states(everything: list[ViewRateLimits[Any]], key: str) -> Iterator[tuple[ScopedLimiter, set[str]]]:
    """Every limiter, with the keys under which it may know the client."""
    if not key.strip():
        raise click.ClickException(f"give the key of a client, such as 192.0.2.1, got {key!r}")
    for limits in everything:
        for limiter in limits.known_limiters():
            yield limiter, limits.stored_keys(limiter, key)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
