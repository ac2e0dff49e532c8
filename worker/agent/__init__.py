"""Starts, watches and stops the training processes of one host.

gate.py is the first thing that a training process runs, processes.py the process as its launcher sees it, output.py
what it prints, gpus.py which GPU it sees, guardian.py the helper that ends everything when the launcher itself is
killed, and agent.py the rules that hold them together. Nothing here knows who asks: `horovodrun` embeds it, a host
daemon can.
"""
