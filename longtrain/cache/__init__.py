"""Where keys and values of the committed text and of a step's rows are kept: dense, evicted or quantised."""
