"""SpeContext: a head pruned from an EAGLE-3 draft says which rows the target's next forward reads."""
