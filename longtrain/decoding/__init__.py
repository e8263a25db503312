"""Prefill, then cycles of draft, verification and commit, with any draft, evictor and cache together."""
