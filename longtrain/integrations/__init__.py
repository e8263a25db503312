"""Classes for other inference engines: one file each, which imports the engine and nothing of longtrain.

Nothing in longtrain imports them. Copy a file beside your script, or name it by its module path.
"""
