"""The page with charts that `rooflight explain --html` writes."""

from rooflight.limits.report.page import report

__all__ = ["report"]
