"""`manage.py headgate rules`, `show KEY`, `reset KEY` and `migrate`: limits, one client, and the tables of a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from headgate.errors import StoreUnavailable
from headgate.stores.base import is_per_process
from headgate.web.django.limits import DjangoLimit, DjangoRateLimits
from headgate.web.django.settings import current
from headgate.web.django.views import METHODS, class_of, declared_on, handler_name, routes, throttles_of
from headgate.web.startup import UNSEEN


class Command(BaseCommand):
    help = "Shows the limits of this project, shows or resets those of one client, or makes the tables of its store."

    def add_arguments(self, parser: Any) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("rules", help="list all limits")
        actions.add_parser("migrate", help="make the tables and functions of a PostgreSQL store")
        for name, text in (("show", "how much a client has left"), ("reset", "forget a client in every limit")):
            action = actions.add_parser(name, help=text)
            action.add_argument("key", help="an address, user:ID, or the value of a header or a field")

    def handle(self, *args: Any, action: str, key: str = "", **options: Any) -> None:
        limits = current()
        if action in ("show", "reset") and not key.strip():
            raise CommandError(f"{action} takes the key of a client, such as 192.0.2.1 or user:7, got {key!r}")
        if action == "migrate":
            self.migrate(limits.store)
            return
        rules = list(listed(limits))
        if action == "rules":
            for place, limit in rules:
                self.stdout.write(f"{place:40} {limit!r}")
        elif is_per_process(limits.store):
            raise CommandError(UNSEEN.format("HEADGATE['STORE']"))
        elif action == "show":
            self.show(limits, key)
        elif limits.reset(key):
            self.stdout.write(f"{key} is as if never seen")
        else:
            raise CommandError(f"the store could not be told to forget {key!r}")

    def migrate(self, store: Any) -> None:
        """Make what a PostgreSQL store needs; the user of the database must be one that may make tables."""
        if not hasattr(store, "migrate"):
            raise CommandError(f"only a PostgreSQL has tables, and the store is {store!r}: set HEADGATE['DATABASE']")
        try:
            store.migrate()
        except StoreUnavailable as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"the tables of {store!r} are there")

    def show(self, limits: DjangoRateLimits, key: str) -> None:
        """Print what a client has left of each limit whose quota is not a function's."""
        for limiter in limits.known_limiters():
            seen = [limiter.blocking.peek(stored, 0) for stored in limits.stored_keys(limiter, key)]
            if not seen:
                continue  # what is no address has no state where addresses count
            made = min(seen, key=lambda decision: decision.remaining)
            if made.degraded:
                raise CommandError("the store does not answer")
            quotas = ", ".join(map(str, limiter.rule.quotas))
            again = f", all in {made.reset_after:.0f} s" if made.remaining < made.limit else ""
            self.stdout.write(f"{limiter.scope:40} {made.remaining} of {quotas} by {limiter.subject.name}{again}")


def listed(limits: DjangoRateLimits) -> Iterator[tuple[str, DjangoLimit]]:
    """All limits of the project and where they are. Their limiters are known to *limits* then."""
    if limits.default is not None:
        yield "everything else", limits.default
    seen: set[tuple[str, DjangoLimit]] = set()
    for route in routes():
        for method in METHODS:
            for place, limit in _of_view(limits, route.path, route.view, method):
                limits.limiters_of(limit, place)
                if (place, limit) not in seen:
                    seen.add((place, limit))
                    yield place, limit


def _of_view(limits: DjangoRateLimits, path: str, view: Any, method: str) -> Iterator[tuple[str, DjangoLimit]]:
    for declared in declared_on(view, method):
        yield f"{handler_name(view, method, declared)}/{path}", limits.of(declared)
    for each in throttles_of(view, method):
        throttle = each() if isinstance(each, type) else each
        scoped = getattr(class_of(view), getattr(throttle, "scope_attr", ""), None)
        if scoped:
            throttle.scope = scoped
        rate = throttle.rate or (throttle.get_rate() if throttle.scope else None)
        if (asked := throttle.ask(rate, "anybody")) is not None:
            yield f"/{path}", asked[0]
