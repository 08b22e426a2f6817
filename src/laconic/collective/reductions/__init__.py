"""Reductions: how ranks compute a mean."""
