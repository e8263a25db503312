"""Between the words of the command line and the jobs: help, completion, checks, order, error lines."""
