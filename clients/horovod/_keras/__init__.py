"""What horovod.keras, horovod.tensorflow.keras and horovod.tensorflow share for Keras. Private.

    optimizer       a Keras 3 optimizer that reduces gradients          loss_scale    the same under mixed precision
    tf_keras        an optimizer of Keras 2 (tf_keras)                  callbacks     what `fit` calls
    backends        collectives on the tensors of Keras's backend       elastic       states
    loading         load_model                                          jit           XLA or not
    state           the variables of a model and its optimizer
    api             functions that horovod.keras and horovod.tensorflow.keras have in common
    names           the table of names that they share
    classes         the callbacks and states for one of both Keras

Modules here import a Keras or a framework only where they must: Keras's backend is chosen when it is first imported.
"""
