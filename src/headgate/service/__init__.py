"""headgate over HTTP: the same limiters for everything that is not Python. `headgate serve` starts it."""

from importlib.util import find_spec

for _name in ("granian", "msgspec"):
    if find_spec(_name) is None:
        raise ImportError(f"the service needs {_name}: pip install 'headgate[service]'")
