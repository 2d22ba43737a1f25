"""A short one; `make soak` takes longer."""

from tests.support.servers import Server
from tests.support.torture import TTL, torture


def test_torture(mortal_server: Server) -> None:
    outcome = torture(mortal_server, processes=6, seconds=4.0, least=15)
    print(outcome)
    assert outcome.unexplained == 0, "somebody wrote without the lock, and could have known"
    assert outcome.shared == 0 and outcome.fences_grow
    assert outcome.longest_stuck < TTL + 5.0, "the lock was stuck; a busy machine may need seconds to start a process"
