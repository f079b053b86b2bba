"""The page that shows it all: one self-contained HTML file about a set of runs."""

from subquad.report.page import write_report
from subquad.report.runs import find_runs

__all__ = ["find_runs", "write_report"]
