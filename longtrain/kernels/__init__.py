"""Operators with Triton kernels: each folder has what it computes, a twin in plain torch, and the launch."""
