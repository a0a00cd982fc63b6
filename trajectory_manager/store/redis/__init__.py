"""The store on Redis: keys, encoding, one Lua script per atomic step."""
