"""A short one; `make soak` takes longer."""

from headgate.coordination.semaphore_leases import WAITER_TTL
from tests.support.semaphore_torture import LEASE, LIMIT, torture_semaphore
from tests.support.servers import Server
from tests.support.torture import TTL, torture


def test_torture(mortal_server: Server) -> None:
    outcome = torture(mortal_server, processes=6, seconds=2.5, least=15)
    print(outcome)
    assert outcome.unexplained == 0, "somebody wrote without the lock, and could have known"
    assert outcome.shared == 0 and outcome.fences_grow
    assert outcome.longest_stuck < TTL + 5.0, "the lock was stuck; a busy machine may need seconds to start a process"


def test_semaphore_torture(mortal_server: Server) -> None:
    """Processes that are killed and stopped never weigh more than the limit, and all room comes back within a lease."""
    outcome = torture_semaphore(mortal_server, processes=5, seconds=2.0, least=15)
    print(outcome)
    assert LIMIT // 2 < outcome.most <= LIMIT, "more room was held than there is, or the test saw too little"
    assert outcome.fences_differ
    assert outcome.all_free_after < LEASE + 2.0, "room was taken for longer than a lease"
    assert outcome.longest_stuck < WAITER_TTL + 5.0, "no process got room; a busy machine may need seconds to start one"
