"""Figures to pages: tables and plain HTML. Sees Records and nothing else."""

from laconic.report.summary import NOTES, WORDS, Table, compare, page, write_page

__all__ = ["NOTES", "WORDS", "Table", "compare", "page", "write_page"]
