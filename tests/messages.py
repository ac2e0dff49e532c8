"""Messages with anything in them, made from their descriptors: a new field is covered as it is."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st


def integers(bits: int, signed: bool) -> st.SearchStrategy[int]:
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return st.one_of(st.integers(0, 4), st.sampled_from([least, most]), st.integers(least, most))


TEXTS = st.one_of(
    st.sampled_from(["", "allreduce.x", "allgather.x", "witness", "witness0", "fuzz", "node-a", "x" * 5000, "\0\n"]),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=64),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_ENUM: integers(32, True),  # proto3 passes unknown numbers on
    FieldDescriptor.TYPE_INT32: integers(32, True),
    FieldDescriptor.TYPE_INT64: integers(64, True),
    FieldDescriptor.TYPE_SINT32: integers(32, True),
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_UINT32: integers(32, False),
    FieldDescriptor.TYPE_UINT64: integers(64, False),
}


def _is_repeated(field: Any) -> bool:
    """protobuf has said it in two ways; the first one warns in versions that have the second."""
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED)


@st.composite
def messages(draw: st.DrawFn, kind: Any) -> Any:
    """A message with some of its fields set to anything."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if draw(st.integers(0, 2)) == 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in draw(st.lists(TEXTS, max_size=3)):
                getattr(made, field.name)[key] = draw(TEXTS)
        elif field.message_type is not None:
            one = messages(getattr(field.message_type, "_concrete_class"))  # noqa: B009 (no public name)
            if _is_repeated(field):
                getattr(made, field.name).extend(draw(st.lists(one, max_size=3)))
            else:
                getattr(made, field.name).CopyFrom(draw(one))
        elif _is_repeated(field):
            getattr(made, field.name).extend(draw(st.lists(SCALARS[field.type], max_size=4)))
        else:
            setattr(made, field.name, draw(SCALARS[field.type]))
    return made
