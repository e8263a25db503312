"""`longtrain serve`: request bodies, the worker that decodes, and the HTTP routes."""
