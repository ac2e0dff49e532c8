"""What horovod.keras, horovod.tensorflow.keras and horovod.tensorflow share for Keras. Private.

    optimizer       what makes an optimizer a distributed one           kinds         which Keras an optimizer is of
    keras3          an optimizer of Keras 3                             copies        copies of distributed optimizers
    loss_scale      the same under mixed precision                      jit           XLA or not
    backends        collectives on the tensors of Keras's backend       adapters      these, and optimizers of Keras 2
    callbacks       what `fit` calls                                    elastic       states
    loading         load_model                                          state         the variables of a model
    held            what ranks compare of a training
    api             functions that horovod.keras and horovod.tensorflow.keras have in common
    names           the table of names that they share
    classes         the callbacks and states for one of both Keras

Modules here import a Keras only where they must: Keras's backend is chosen when it is first imported. No module
imports a framework of ours, but for `adapters`, which stand above them.
"""
