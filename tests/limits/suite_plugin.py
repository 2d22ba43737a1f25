"""A plugin for the pytest that runs the tests of Flask-Limiter and of limits, in an environment of their own.

It installs headgate below `limits` before their tests are imported, and takes the place of the plugin that starts their
containers: `tests.limits.suites` has started the servers.
"""

from typing import Any

import pytest

import headgate.limits

headgate.limits.install()


class Services:
    """All services run already."""

    def start(self, name: str) -> None:
        """Nothing is left to start."""

    def wait_for_service(self, name: str, *_port_and_check: Any) -> None:
        """Nor to wait for."""


@pytest.fixture(scope="session")
def docker_services() -> Services:
    return Services()
