"""How operations in graphs meet those of the other ranks: the floor of all operations, which imports none of them.

    names           each has a name of its own in its function
    call_numbers    and, where functions call each other, the number of the call
    call_order      what has no number of its own is called in the script's order
    xla_order       what XLA compiles runs in the order in which it was traced

Whether ranks use several models in one order is a question to all of them, and so an operation: model_order.py above.
"""
