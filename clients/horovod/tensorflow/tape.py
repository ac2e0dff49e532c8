"""hvd.DistributedGradientTape: a tf.GradientTape whose `gradient` returns gradients reduced over all ranks.

It shares its recording with the tape that it was made from, which stays what it was.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import tensorflow as tf

from horovod._keras.state import weights_of
from horovod.common.basics import Average
from horovod.common.gradients import Reduction, Taken, groups_of, identity, refuse
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.gradients import reduced_but_local
from horovod.tensorflow.library import as_it_is
from horovod.tensorflow.once import hand_out

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


_Tape = TypeVar("_Tape", bound=tf.GradientTape)
_TAPE: Final = Taken("a tf.GradientTape", "the `tape` of `with tf.GradientTape() as tape:`", (tf.GradientTape,), "()")


class _DistributedTape(tf.GradientTape):
    """What the subclass of the user's tape adds. Comes first in the method resolution order."""

    __slots__ = ("_hvd_local", "_hvd_reduction")  # beside __dict__, which the tape has in common with the user's

    _hvd_local: dict[int, Any]
    _hvd_reduction: Reduction

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays that of this rank, divided by the number of ranks."""
        self._hvd_local[identity(source)] = source

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients in the structure of `sources`, reduced over the ranks; None where there is none.

        use_generic_names: ranks match them as grad_0, grad_1 and so on, whatever the variables' names are.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients=unconnected_gradients)
        gradients, variables = _flat(own), _flat(sources)
        results = reduced_but_local(
            gradients, variables, set(self._hvd_local), self._hvd_reduction, generic_names=use_generic_names
        )
        hand_out(results, variables, self._hvd_reduction)
        return tf.nest.pack_sequence_as(_structure(sources), results, expand_composites=False)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs (source, gradient as `gradient` returns it): those of local sources, and all others."""
        gradients = _flat(self.gradient(target, sources, output_gradients, use_generic_names))
        pairs = list(zip(_flat(sources), gradients, strict=True))
        local = [pair for pair in pairs if identity(pair[0]) in self._hvd_local]
        return local, [pair for pair in pairs if identity(pair[0]) not in self._hvd_local]


def DistributedGradientTape(  # noqa: N802
    gradtape: _Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> _Tape:
    """A tape with the recording of `gradtape`, whose `gradient` returns gradients reduced over all ranks. Example:

        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(images), labels)
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> gradients = tape.gradient(loss, model.trainable_variables)

    Args:
        gradtape: a tf.GradientTape, before or after it has recorded.
        device_dense, device_sparse: devices of the operations for dense gradients and tf.IndexedSlices.
        compression: how gradients are sent, for example Compression.fp16.
        sparse_as_dense: make tf.IndexedSlices dense before they are reduced.
        op: hvd.Average, hvd.Sum or hvd.Adasum.
        gradient_predivide_factor: with Average, divides by this before and by size / this after the sum.
        num_groups: deprecated, use groups.
        groups: reduce gradients together: a number of groups of equal length, or lists of variables.
        process_set: the ranks that take part. On other ranks gradients stay unchanged.
        scale_local_gradients: divide gradients of sources given to `register_local_source` by the number of ranks.

    Raises:
        TypeError: `gradtape` is not a tape, but a model, a class or another object.
        ValueError, NotImplementedError: arguments that contradict each other.
        tf.errors.OpError: the errors of hvd.allreduce, by `gradient`.
    """
    if isinstance(gradtape, _DistributedTape):
        warnings.warn(
            "hvd.DistributedGradientTape was given a tape that is distributed already; it is returned unchanged.",
            stacklevel=2,
        )
        return gradtape
    if not isinstance(gradtape, tf.GradientTape):
        raise refuse(gradtape, "hvd.DistributedGradientTape", _TAPE)
    base: Any = type(gradtape)
    tape = object.__new__(_class_of(base))
    tape.__dict__ = gradtape.__dict__
    tape._hvd_local = {}
    tape._hvd_reduction = Reduction(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
    )
    return tape


def PartialDistributedGradientTape(  # noqa: N802
    gradtape: _Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> _Tape:
    """`DistributedGradientTape` for models of which some layers are this rank's own. Example:

        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=[model.layers[0]])

    Takes and raises what `DistributedGradientTape` does, and

    local_layers: a Keras layer or a list of them, whose weights exist; else ValueError.
    """
    tape: Any = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in weights_of(local_layers):
        tape.register_local_source(variable)
    return tape


@functools.cache
def _class_of(base: type) -> Any:
    if base is tf.GradientTape:
        return _DistributedTape
    return type(base.__name__, (_DistributedTape, base), {"__slots__": (), "__module__": base.__module__})


# Structures whose leaves are variables; a keras.Variable is a leaf, which tf.nest knows, and so are tf.IndexedSlices.
def _flat(structure: Any) -> list[Any]:
    return tf.nest.flatten(structure, expand_composites=False)


def _structure(sources: Any) -> Any:
    return tf.nest.map_structure(lambda _: 0, sources, expand_composites=False)


as_it_is(
    DistributedGradientTape,
    PartialDistributedGradientTape,
    _DistributedTape.gradient,
    _DistributedTape.get_local_and_global_gradients,
)
