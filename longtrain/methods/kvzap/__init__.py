"""KVzap: small layers beside the attention predict KVzip's scores, by which KV entries are evicted."""
