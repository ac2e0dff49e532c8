"""Jobs on this machine: every rank is a child of the launcher, whose own coordinator decides."""
