"""One machine at two places, step by step: Redis must answer what memory answers, and again what it answered before."""

from collections.abc import Callable, Sequence
from typing import Any

from headgate.coordination.backend import MemoryStates
from headgate.coordination.redis_states import RedisStates
from headgate.coordination.states.machine import Operation, Reply, StateMachine
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.servers import Server


class Twins:
    """The same name of the same machine in memory and on *server*, on one clock."""

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

    def step(self, op: str, *arguments: str | int, times: int = 1) -> list[Any]:
        """Both answers, which are equal, however often it is asked."""
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
