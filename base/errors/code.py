"""An error's code: what kind of fault it is, as a word that programs, tests and the documentation name.

The code stands in square brackets after the sentence: `There is no host named 'b'. [unknown-host]`. An error passes
through C++, gRPC, TensorFlow's statuses and the output of other processes, and text is what all of them keep.
"""

from __future__ import annotations

import enum
import re

# Behind the message of a node TensorFlow puts which one it was: ` [Op:HorovodAllreduce] name: x`, or a line
# `[[{{node x}}]]` and more lines. The message of an assertion is in brackets itself.
_AT_THE_END = re.compile(r"\s\[([a-z0-9-]+)\](?:\s*\Z|(?=\]?\s+\[Op:|\]?\s+\[\[\{\{node ))")
_BY_WORD: dict[str, ErrorCode] = {}


class ErrorCode(str, enum.Enum):  # Python 3.10 has no StrEnum
    """The codes of one family are a subclass. A member has its word, and the meaning that docs/errors.md shows: what
    has happened, and what to do.
    """

    meaning: str

    __str__ = str.__str__

    def __new__(cls, word: str, meaning: str) -> ErrorCode:
        if word in _BY_WORD:
            raise ValueError(f"two error codes have the word {word!r}")
        code = str.__new__(cls, word)
        code._value_ = word
        code.meaning = meaning
        _BY_WORD[word] = code
        return code


def coded(code: ErrorCode, sentence: str) -> str:
    """The sentence with the code behind it. The sentence of another error that it ends with loses its own code."""
    return f"{without_code(sentence)} [{code}]"


def code_of(error: BaseException | str) -> ErrorCode | None:
    """The code of an error, or of the text that another process printed; None when the text does not end with one."""
    found = _AT_THE_END.search(str(error))
    return _BY_WORD.get(found[1]) if found else None


def coded_like(text: BaseException | str, sentence: str) -> str:
    """The sentence with the code of `text` behind it, if that has one: what `sentence` says is the same fault."""
    code = code_of(text)
    return sentence if code is None else coded(code, sentence)


def without_code(text: BaseException | str) -> str:
    """The sentence alone, for another sentence that holds it."""
    sentence = str(text)
    return sentence if code_of(sentence) is None else _AT_THE_END.sub("", sentence)
