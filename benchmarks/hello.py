"""A bare "hello" on granian, set up as the service is: what HTTP and the interpreter cost before anybody decides."""

import sys

from granian import Granian
from granian.constants import Interfaces

HEADERS = [("content-type", "application/json")]


async def app(scope: object, protocol: object) -> None:
    protocol.response_str(200, HEADERS, '{"message":"hello"}')  # type: ignore[attr-defined]  # granian has no name for it


if __name__ == "__main__":
    Granian(
        "benchmarks.hello:app", port=int(sys.argv[1]), interface=Interfaces.RSGI, websockets=False, log_enabled=False
    ).serve()
