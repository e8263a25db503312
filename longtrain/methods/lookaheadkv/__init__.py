"""LookaheadKV: lookahead tokens with LoRA predict which prompt tokens the answer will attend to."""
