"""Reports about Records: a table for terminals, and one HTML file with tables, plots and the planner's sliders."""

from laconic.report.build import Report, build
from laconic.report.page import write_page
from laconic.report.runs import Prices
from laconic.report.sources import Sources, gather
from laconic.report.summary import NOTES, WORDS, compare

__all__ = ["NOTES", "WORDS", "Prices", "Report", "Sources", "build", "compare", "gather", "write_page"]
