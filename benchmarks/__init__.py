"""Measurements of horovod beside what one would use instead, in one run on one machine.

    collectives.py   ranks on this host: every collective, every size, and sets of gradients
    network.py       ranks on several hosts that are network namespaces of this one (needs root)

A library's ranks are processes that start once (world.py), are told over a socket what to run (worker.py) and block
while another library is measured. The values of every timed block are checked (values.py); a figure whose values were
not checked cannot be made (measure.py).
"""
