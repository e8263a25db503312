"""Operators with Triton kernels: each folder has the operator, a reference in plain torch, and the launch."""
