"""What a coordinator shows to people, scrapers and probes, on a port of its own (`--web-listen`)."""
