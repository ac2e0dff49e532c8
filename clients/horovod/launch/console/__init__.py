"""The launcher's terminal: signals and stdin for the job, and its output, progress, last sentence and exit code."""
