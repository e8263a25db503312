"""Conversations and prompts as tokens with label masks, answered by people or by the target."""
