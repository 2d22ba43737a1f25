"""The long runs, against the bars of docs/coordination.md: `make soak`."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.servers import KINDS, Server

ROOT = Path(__file__).parent.parent.parent
CRAWLS = 3


def main() -> None:
    for module in ("tests.support.torture", "tests.support.semaphore_torture"):
        subprocess.run([sys.executable, "-m", module], cwd=ROOT, check=True)
    server = Server(KINDS[0])
    environment = os.environ | {"HEADGATE_EXAMPLE_REDIS": server.patient_url, "HEADGATE_EXAMPLE_LEAST": "0.95"}
    for _ in range(CRAWLS):
        subprocess.run([sys.executable, "examples/crawler.py"], cwd=ROOT, env=environment, check=True)
    server.stop()


if __name__ == "__main__":
    main()
