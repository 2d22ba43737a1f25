"""Where a budget keeps its state, and for which callers: as for the tools of coordination."""

from tests.coordination.conftest import _cluster, cluster, name, node, sentinels, tools, url

__all__ = ["_cluster", "cluster", "name", "node", "sentinels", "tools", "url"]
