"""The page that shows it all, one self-contained HTML file about a set of runs; a bench's picture; images compared."""

from subquad.pages.analysis_page import write_analysis
from subquad.pages.comparisons import measure_of
from subquad.pages.conversion_page import write_conversion
from subquad.pages.image_page import write_images_page
from subquad.pages.page import write_report
from subquad.pages.page_parts import check_page
from subquad.pages.standalone_charts import bench_picture, check_picture

__all__ = [
    "bench_picture",
    "check_page",
    "check_picture",
    "measure_of",
    "write_analysis",
    "write_conversion",
    "write_images_page",
    "write_report",
]
