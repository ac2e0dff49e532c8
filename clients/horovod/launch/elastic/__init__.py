"""What an elastic job is asked for."""
