"""A step that fits an amount of memory: by schedule (plan), or by computing again (remat)."""
