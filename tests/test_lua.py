"""Scripts other than the limiter's, through the same executors."""

import asyncio

import pytest
import redis
from redis.crc import key_slot

from headgate.redis.script import LuaScript, slot_of
from headgate.stores.redis import RedisStore
from tests.support.servers import Server

ADD = LuaScript(
    "for i, key in ipairs(KEYS) do redis.call('SET', key, (redis.call('GET', key) or 0) + ARGV[i]) end "
    "return {ARGV[1], ARGV[2]}"
)
KEYS = ["rate_limiter:{a}:1", "rate_limiter:{a}:2"]


@pytest.mark.parametrize("key", ["lock:{a}", "plain", "{}empty", "pool:{name}:ready", "{open", "a{b}c{d}", "키:{토큰}"])
def test_slot_is_the_servers(key: str, redis_server: Server) -> None:
    assert slot_of(key) == key_slot(key.encode())


def test_threads(redis_server: Server) -> None:
    store = RedisStore(redis_server.url)
    assert store.sync_executor().execute(ADD, ADD.call(KEYS, 3, "4")) == [b"3", b"4"]
    assert store.sync_executor().execute(ADD, ADD.call(KEYS, 3, "4")) == [b"3", b"4"]
    assert redis_server.client().mget(KEYS) == ["6", "8"]
    store.close()


async def test_loop(redis_server: Server) -> None:
    store = RedisStore(redis_server.url)
    replies = await asyncio.gather(*(store.async_executor().execute(ADD, ADD.call(KEYS, i, 1)) for i in range(5)))
    assert [int(reply[0]) for reply in replies] == [0, 1, 2, 3, 4]
    await store.aclose()


def test_error_of_the_script(redis_server: Server) -> None:
    store = RedisStore(redis_server.url)
    fails = LuaScript("return redis.error_reply('NO not today')")
    with pytest.raises(redis.ResponseError, match="not today"):
        store.sync_executor().execute(fails, fails.call(KEYS))
    store.close()
