"""The page that shows it all, one self-contained HTML file about a set of runs; a bench's picture; images compared."""

from subquad.report.analysis import Findings, confusion_words, removal_shares, write_analysis
from subquad.report.images import write_images_page
from subquad.report.page import write_report
from subquad.report.pictures import PICTURES, bench_picture
from subquad.report.runs import find_runs

__all__ = [
    "PICTURES",
    "Findings",
    "bench_picture",
    "confusion_words",
    "find_runs",
    "removal_shares",
    "write_analysis",
    "write_images_page",
    "write_report",
]
