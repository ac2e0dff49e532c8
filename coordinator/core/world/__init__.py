"""The worlds of jobs: who joins, when a world forms, who leaves, who is lost."""
