"""Classes for other people's engines: one file each, which imports the engine and nothing of longtrain.

Nothing in longtrain imports them. Copy a file beside a script of yours, or name it by its module path.
"""
