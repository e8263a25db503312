"""KV caches: dense, evicted, selected, offloaded to the host, or quantised."""
