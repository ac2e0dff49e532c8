"""Elastic jobs: what is asked of one, where its hosts come from, and the driver that follows them."""
