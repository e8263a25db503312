"""Estimates of a run before anything is loaded: the plan shared by `plan`, `train` and its dry run."""
