"""LookaheadKV: soft tokens and their LoRA foretell which rows of the prompt the answer will read."""
