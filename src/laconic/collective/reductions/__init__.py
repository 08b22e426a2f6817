"""Reduction strategies: how a mean over ranks is computed and moved."""
