"""SpeContext: a head pruned from an EAGLE-3 draft selects the KV entries that the target reads."""
