"""The jobs that are submitted, and the hosts that run them: placing, starting, ending."""
