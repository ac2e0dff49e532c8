"""Jobs on a cluster of agents: submitted, followed, listed and stopped through its coordinators."""
