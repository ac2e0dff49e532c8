"""Jobs on hosts that ssh reaches: an agent on each for one run, and the coordinator in the launcher."""
