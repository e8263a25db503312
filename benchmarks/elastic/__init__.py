"""`suite=elastic`: sparse decoding with KV entries on the GPU and on the host; times and transfers."""
