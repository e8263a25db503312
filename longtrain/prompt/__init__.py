"""Everything between the typed command line and the jobs: help, completion, checks, job order, error
messages.
"""
