"""The page that shows it all, one self-contained HTML file about a set of runs; and a bench's picture."""

from subquad.report.page import write_report
from subquad.report.pictures import PICTURES, bench_picture
from subquad.report.runs import find_runs

__all__ = ["PICTURES", "bench_picture", "find_runs", "write_report"]
