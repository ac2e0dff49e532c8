"""Prints the page."""

from horovod.frameworks_page.page import markdown

print(markdown(), end="")
