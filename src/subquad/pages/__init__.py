"""The page that shows it all, one self-contained HTML file about a set of runs; a bench's picture; images compared."""

from subquad.pages.analysis_page import Findings, confusion_words, removal_shares, write_analysis
from subquad.pages.image_page import write_images_page
from subquad.pages.page import write_report
from subquad.pages.standalone_charts import PICTURES, bench_picture
from subquad.runs.run_records import find_runs

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
