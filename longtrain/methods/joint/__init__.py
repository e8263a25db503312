"""Several modules trained together: one forward of the target a row serves all of them."""
