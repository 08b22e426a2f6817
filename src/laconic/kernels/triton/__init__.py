"""Kernels for NVIDIA GPUs, written in Triton and compiled when first used."""
