"""What a client gets that was refused: the project's own answer, its page for 429, or a problem; and who is told."""

from typing import Any

import pytest
from django.http import HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import override_settings
from django.utils import translation

from headgate.web.django import Ratelimited, rate_limited
from tests.web.django_site import urls
from tests.web.django_site.site import Site, body

LIMITED = ["/plain/", "/async_plain/", "/free/", "/async_free/"]
HTML = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}


def refused(site: Site, path: str, **arguments: Any) -> Any:
    """The answer to a request that is one too many."""
    site.configure(HEADGATE={"DEFAULT": "2/hour", **arguments.pop("HEADGATE", {})}, **arguments.pop("settings", {}))
    assert site.statuses(path, path) == [200, 200]
    answer = site.request(path, **arguments)
    assert answer["retry-after"] == "1800" and answer["x-ratelimit-remaining"] == "0"
    assert answer["cache-control"] == "no-store"
    return answer


@pytest.mark.parametrize("path", ["/politely/", "/async_politely/"])
def test_on_denied(site: Site, path: str) -> None:
    """The limit's own answer, plain or async, with the headers of the limit."""
    first, second = site.request(path), site.request(path)
    assert first.status_code == 200
    assert second.status_code == 503 and body(second) == "please wait 3600 s" and second["retry-after"] == "3600"


@pytest.mark.parametrize("path", LIMITED)
def test_on_denied_of_the_project(site: Site, path: str) -> None:
    answer = refused(site, path, HEADGATE={"ON_DENIED": "tests.web.django_site.views.async_polite"})
    assert answer.status_code == 503 and body(answer) == "please wait 1800 s"


@pytest.mark.parametrize("path", LIMITED)
def test_migration_by_handler403(site: Site, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project that answers `Ratelimited` in its handler403 keeps it."""

    def handler403(request: Any, exception: Exception) -> HttpResponse:
        assert isinstance(exception, Ratelimited) and exception.decision is not None
        return HttpResponse(f"{exception.decision.limit} are enough", status=429)

    monkeypatch.setattr(urls, "handler403", handler403, raising=False)
    site.configure(HEADGATE={"DEFAULT": "2/hour", "ON_DENIED": "headgate.web.django.raise_ratelimited"})
    assert site.statuses(path, path) == [200, 200]
    assert body(site.request(path)) == "2 are enough"


RUBBISH = [False, "no", b"no", 429, ("no", 429), {"detail": "no"}, HttpResponse]


@pytest.mark.parametrize("path", LIMITED)
def test_rubbish(site: Site, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no response is a 500 and never lets the request pass; None of on_denied leaves the 429 as it is."""
    assert refused(site, path, HEADGATE={"ON_DENIED": lambda request, decision: None}).status_code == 429
    for rubbish in RUBBISH:
        site.configure(HEADGATE={"DEFAULT": "2/hour", "ON_DENIED": lambda request, decision, given=rubbish: given})
        assert site.statuses(path, path, path, path) == [200, 200, 500, 500], rubbish
    for rubbish in (None, *RUBBISH):
        monkeypatch.setattr(urls, "handler429", lambda request, exception, given=rubbish: given, raising=False)
        site.configure(HEADGATE={"DEFAULT": "2/hour"})
        assert site.statuses(path, path, path, path) == [200, 200, 500, 500], rubbish


@pytest.mark.parametrize("path", LIMITED)
def test_template_response(site: Site, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is rendered late is rendered also where the middleware answers, and no view."""

    def page(request: Any, *_: Any, **__: Any) -> TemplateResponse:
        return TemplateResponse(request, engines["django"].from_string("wait"), status=429)

    assert body(refused(site, path, HEADGATE={"ON_DENIED": page})) == "wait"
    monkeypatch.setattr(urls, "handler429", page, raising=False)
    assert body(refused(site, path)) == "wait"


def plain_handler(request: Any, exception: Ratelimited) -> HttpResponse:
    assert exception.decision is not None and not exception.decision
    return HttpResponse("handled", status=429)


async def async_handler(request: Any, exception: Ratelimited) -> HttpResponse:
    return plain_handler(request, exception)


HANDLERS = {"plain": plain_handler, "async": async_handler, "dotted": f"{__name__}.plain_handler"}


@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("path", LIMITED)
def test_handler429(site: Site, path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of the root URLconf, plain or async, or its dotted path."""
    monkeypatch.setattr(urls, "handler429", HANDLERS[kind], raising=False)
    answer = refused(site, path)
    assert answer.status_code == 429 and body(answer) == "handled"


@pytest.mark.parametrize("path", LIMITED)
def test_template(site: Site, path: str) -> None:
    """429.html, for clients that accept HTML; others get the problem."""
    engine = "django.template.backends.django.DjangoTemplates"
    pages = {"429.html": "wait {{ retry_after }} s: {{ decision.limit }} are enough, {{ request.path }}"}
    processors = ["django.template.context_processors.request"]
    options = {"loaders": [("django.template.loaders.locmem.Loader", pages)], "context_processors": processors}
    changed = {"TEMPLATES": [{"BACKEND": engine, "OPTIONS": options}]}
    answer = refused(site, path, settings=changed, headers=HTML)
    assert answer.status_code == 429 and body(answer) == f"wait 1800 s: 2 are enough, {path}"
    assert answer["content-type"] == "text/html; charset=utf-8"
    answer = site.request(path, headers={"Accept": "application/json"})
    assert answer["content-type"] == "application/problem+json" and answer.json()["retryAfterSeconds"] == 1800


def test_problem_is_translated(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with translation.override("de"):
        catalog = translation._trans.catalog()._catalog  # where gettext finds texts
        text = "Rate limit exceeded (%(quotas)s); retry in %(seconds)d s"
        monkeypatch.setitem(catalog._catalogs[0], text, "Zu viele Anfragen (%(quotas)s), weiter in %(seconds)d s")
    locale = "django.middleware.locale.LocaleMiddleware"
    changed = {"MIDDLEWARE": [locale, "headgate.web.django.RateLimitMiddleware"]}
    answer = refused(site, "/async_plain/", settings=changed, headers={"Accept-Language": "de"})
    assert answer.json()["detail"] == "Zu viele Anfragen (2/hour), weiter in 1800 s"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain receiver", "async receiver"])
@pytest.mark.parametrize("path", [*LIMITED, "/noted/", "/api/anon/", "/ninja/anon"])
def test_signal(site: Site, path: str, asynchronous: bool) -> None:
    """Sent for each refusal, of decorators, the default and throttles; a receiver's error does not reach the client."""
    told: list[Any] = []

    def receive(sender: Any, request: Any, decision: Any, **_: Any) -> None:
        told.append((request.path, decision.allowed))
        raise RuntimeError("a mistake of the receiver")

    async def receive_async(sender: Any, request: Any, decision: Any, **_: Any) -> None:
        receive(sender, request, decision)

    receiver: Any = receive_async if asynchronous else receive
    if asynchronous and not hasattr(rate_limited, "asend"):
        pytest.skip("signals of this Django have no async receivers")
    site.configure(HEADGATE={"DEFAULT": "2/hour"})
    rate_limited.connect(receiver)
    try:
        seen = site.statuses(path, path, path)
    finally:
        rate_limited.disconnect(receiver)
    assert seen == ([200] * 3 if path == "/noted/" else [200, 200, 429])
    assert told == [(path, False)] * (2 if path == "/noted/" else 1)


def test_log_of_refusals_is_quiet(wsgi_site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal is a warning of `django.request`, as every answer of the client's making; no error, no traceback."""
    with override_settings(HEADGATE={"DEFAULT": "1/hour"}):
        wsgi_site.statuses("/free/", "/free/")
    assert [record.levelname for record in caplog.records if record.name == "django.request"] == ["WARNING"]
    assert not any(record.exc_info for record in caplog.records)
