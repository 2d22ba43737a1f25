"""Talking to Redis: the script around an algorithm's Lua, the commands as bytes, connections, batches."""
