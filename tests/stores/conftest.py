"""Stores that processes share."""

import pytest

from tests.support.stores import OpenStores, rows


@pytest.fixture(params=rows(lambda row: row.processes and not row.group, colours=("sync",)))
def shared_url(request: pytest.FixtureRequest, open_stores: OpenStores) -> str:
    """The URL of a store that processes share."""
    return open_stores.empty(request.param[0]).patient_url
