"""A run as it is seen from outside: what its folder says, in a terminal, on a page, and for other programs.

Servers keep ``status.json`` and ``progress.jsonl`` up to date while they run; everything else here only reads. Nothing
needs torch, so a view starts at once.
"""
