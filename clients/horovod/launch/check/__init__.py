"""`horovodrun --check`: what of a script for earlier versions fails with this one, or acts otherwise.

    script   a Python source, with the full name of each thing that it uses
    rules    the table: what to look for, the sentence, the remedy
    shell    lines of shell scripts that start horovodrun or set its variables
    files    which files are read, what is printed, the exit status

Sources are parsed and never imported or run.
"""
