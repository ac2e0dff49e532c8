"""What horovod.keras, horovod.tensorflow.keras and horovod.tensorflow share for Keras. Private.

    optimizer       what makes an optimizer a distributed one           kinds         which Keras an optimizer is of
    keras3          an optimizer of Keras 3, mixed precision and XLA    copies        copies of distributed optimizers
    backends        collectives on the tensors of Keras's backend       adapters      these, and optimizers of Keras 2
    callbacks       what `fit` calls, made for one of both Keras        elastic       states
    held            what ranks compare of a training                    state         the variables of a model
    api             functions that horovod.keras and horovod.tensorflow.keras have in common
    names           the table of names that they share

Modules here import a Keras only where they must: Keras's backend is chosen when it is first imported. No module
imports a framework of ours, but for `adapters`, which stand above them.
"""
