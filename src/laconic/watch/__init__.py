"""Status of a run: written to its folder by the servers, shown in a terminal, on a page, to Prometheus and TensorBoard.

Servers update ``status.json`` and ``progress.jsonl`` while they run; everything that shows a run only reads these
files. Nothing here imports torch, so ``laconic watch`` starts at once.
"""
