"""The operations as every framework has them: names, checks, process sets, groups, handles.

`horovod.torch` and its like define the functions that users call, with the gradients, and give Collectives an adapter
(framework.py) that says how their tensors are read and made. Nothing here imports a framework.
"""
