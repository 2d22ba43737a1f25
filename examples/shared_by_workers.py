"""Four processes, one limit, no server: `shared://` keeps it in memory that all processes of this machine map."""

import multiprocessing
import tempfile

from headgate import Limiter


def work(store: str) -> int:
    """What each worker does: make the limiter, and ask it. All of them count in the same place."""
    limiter = Limiter("100/hour", store=store, name="reports")
    return sum(limiter.try_acquire("user:123").allowed for _ in range(60))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = f"shared://{directory}/limits"  # in an application: "shared://myapp"
        with multiprocessing.get_context("spawn").Pool(4) as pool:
            granted = pool.map(work, [store] * 4)
        print(f"the workers were granted {' + '.join(map(str, granted))} = {sum(granted)} of 240 calls")
        assert sum(granted) == 100


if __name__ == "__main__":
    main()
