"""Between a job and whoever started it: signals, stdin, output, progress, and the sentence and exit code at the end."""
