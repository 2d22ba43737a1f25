"""What all tools share: connections that nobody has to close, timers, wake-ups."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server

ROOT = Path(__file__).parent.parent.parent

# An event loop that ends while a call is on its way, begun that many turns before.
ENDS = """
import asyncio, sys
from headgate.coordination import AsyncPool

async def main():
    pool = AsyncPool("x", store=sys.argv[1])
    await pool.add("a")
    asyncio.ensure_future(pool.status())
    asyncio.ensure_future(pool.acquire())
    for _ in range(int(sys.argv[2])):
        await asyncio.sleep(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_an_event_loop_that_ends_in_mid_call(turns: int, redis_server: Server) -> None:
    """Nothing hangs, and nothing is left open, although nobody closed anything."""
    command = [sys.executable, "-W", "error", "-c", ENDS, redis_server.patient_url, str(turns)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stderr) == (0, "")
