"""The test suite: scenarios as tables, twins, oracles and properties, on real servers."""
