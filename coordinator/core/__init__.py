"""The coordinator's decisions, without clock, socket or store: time is an argument, and a refusal is a sentence."""
