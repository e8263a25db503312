"""LookaheadKV."""
