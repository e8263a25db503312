"""Reading a part of the cache at each step: the role that scores its rows, and rules for scores."""
