"""`gradfit demo`."""

from gradfit.cli.options import Debug, Json, Page


def demo(json: Json = False, report: Page = None, debug: Debug = False) -> None:
    """x"""
