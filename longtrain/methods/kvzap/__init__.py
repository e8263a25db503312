"""KVzap: a small layer beside each attention foretells KVzip's scores, and rows scored low are evicted."""
