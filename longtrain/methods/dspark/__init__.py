"""DSpark and DFlash: drafts that predict a block of tokens in one pass over the target's hidden states."""
