"""Jang, Na and Yoon 2017."""
