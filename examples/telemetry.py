"""What headgate does, as Prometheus sees it; `pip install 'headgate[prometheus]'`."""

from prometheus_client import CollectorRegistry, generate_latest

from headgate import Limiter
from headgate.coordination import CircuitBreaker, CircuitOpen
from headgate.telemetry.prometheus import Collector

registry = CollectorRegistry()
registry.register(Collector())  # directory="/run/shop/headgate" for several workers

search = Limiter("3/minute", name="search")
for _ in range(5):
    search.try_acquire("user:123")

api = CircuitBreaker("api.example.com", failures=2)
for _ in range(3):
    try:
        with api:
            raise ConnectionError("down")
    except (ConnectionError, CircuitOpen):
        pass

for line in generate_latest(registry).decode().splitlines():
    if line.startswith(("headgate_decisions_total", "headgate_breaker")) and not line.endswith(" 0.0"):
        print(line)
