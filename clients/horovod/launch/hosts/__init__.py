"""Jobs on hosts where the launcher starts agents for one run: the coordinator is in the launcher.

How a line is run on another host is all that such launchers differ in (agents.RemoteShell): ../ssh has one.
"""
