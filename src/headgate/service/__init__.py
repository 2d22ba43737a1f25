"""headgate over HTTP: the same limiters for everything that is not Python. `headgate serve` starts it."""
