"""Names of before, for callers that have not changed yet."""

from headgate.redis.resp import slot_of as slot_of
from headgate.redis.script import LuaScript as Lua
from headgate.redis.script import ScriptCall as Eval

__all__ = ["Eval", "Lua", "slot_of"]
