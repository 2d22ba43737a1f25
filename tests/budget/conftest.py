"""Where a budget keeps its state, and for which callers: as for the tools of coordination."""

from tests.coordination.conftest import name, tools, url

__all__ = ["name", "tools", "url"]
