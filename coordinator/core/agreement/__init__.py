"""What the ranks of a world agree on: their operations, compared the first time, and what does not get on."""
