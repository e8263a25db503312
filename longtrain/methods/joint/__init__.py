"""Joint training of several modules, which share one forward of the target per packed sequence."""
