"""How operations in graphs meet those of the other ranks: the floor of all operations, which imports none of them.

    names           each has a name of its own in its function and, where functions call each other, the call's number
    call_order      what has no number is called in the script's order; what XLA compiles runs as it was traced

Whether ranks use several models in one order is a question to all of them, and so an operation: model_order.py above.
"""
