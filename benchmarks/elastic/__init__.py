"""`suite=elastic`: sparse decoding with rows on the GPU and on the host, what moves, what it brings."""
