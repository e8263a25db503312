"""Turns text and conversations into packed sequences: reads, tokenises, prepares, packs and batches them."""
