"""A state machine in memory and on Redis, side by side: both must give the same replies, and again if repeated."""

from collections.abc import Callable, Sequence
from typing import Any

from headgate.coordination.backend import MemoryStates
from headgate.coordination.redis_states import RedisStates
from headgate.coordination.states.machine import Operation, Reply, StateMachine
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.servers import Server


class Twins:
    """The same state of *machine* in memory and on *server*, with one clock."""

    def __init__(
        self, machine: StateMachine, server: Server, name: str = "twins", url: str = "", timeout: float = 10
    ) -> None:
        server.flush()
        self.clock = ManualClock()
        self.machine = machine
        self.name = name
        self.server = server
        self.store = RedisStore(url or server.url, timeout=timeout, clock=self.clock)
        self.redis = RedisStates(self.store)
        self.ask: Callable[[StateMachine, str, Operation], Reply] = self.redis.run
        self.memory = MemoryStates(self.clock)

    def step(self, op: str, *arguments: str | int | bytes, times: int = 1) -> list[Any]:
        """Run an operation in both, so many *times*, and return the reply, which must be the same each time."""
        answers = []
        for _ in range(times):
            answers.append(self.memory.run(self.machine, self.name, Operation(op, arguments)))
            answers.append(self.ask(self.machine, self.name, Operation(op, arguments)))
        for answer in answers[1:]:
            assert self.comparable(answer) == self.comparable(answers[0]), (op, arguments, answers)
        return answers[0]

    def comparable(self, answer: Sequence[Any]) -> Sequence[Any]:
        return answer

    def close(self) -> None:
        self.store.close()
