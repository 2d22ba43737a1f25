"""The project for real servers: `application` for WSGI, `asgi` for ASGI."""

from __future__ import annotations

from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application

import tests.web.django_site  # noqa: F401 # configures Django

application = get_wsgi_application()
asgi = get_asgi_application()
