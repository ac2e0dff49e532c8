"""Every word of `event_words.py` is in a text that the product writes: else its absence would prove nothing."""

from __future__ import annotations

import re
from pathlib import Path

import event_words
import pytest

TREE = Path(__file__).parents[2]
WORDS = {name: words for name, words in vars(event_words).items() if name.isupper()}


@pytest.fixture(scope="module")
def sources() -> str:
    """All of them, with the parts of a string that goes over several lines put together."""
    files = [*TREE.glob("csrc/**/*.cc"), *TREE.glob("csrc/**/*.h")]
    for folder in ("base", "clients", "coordinator", "worker"):
        files += TREE.glob(f"{folder}/**/*.py")
    return "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)


@pytest.mark.parametrize("name", WORDS)
def test_the_product_writes_it(name: str, sources: str) -> None:
    assert WORDS[name] in sources
