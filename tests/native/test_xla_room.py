"""csrc/xla serves any framework that compiles with XLA, so it knows none: what it includes and what it says."""

from __future__ import annotations

import re

from native_builds import ROOT

from horovod.base.errors import code_of

SOURCES = sorted((ROOT / "csrc/xla").glob("*.*"))
C_INTERFACE = {"bindings/c_client.h", "bindings/c_api.h"}


def test_it_includes_the_engines_c_interface_and_the_standard_library() -> None:
    client = ROOT / "csrc/bindings/c_client.h"
    own = {f"xla/{path.name}" for path in SOURCES}
    assert own
    for path in (*SOURCES, client):
        included = re.findall(r'#include "(.*?)"|#include <(.*/.*)>', path.read_text())
        assert {quoted or system for quoted, system in included} <= own | C_INTERFACE, path


def test_its_sentences_name_no_framework() -> None:
    assert SOURCES
    for path in SOURCES:
        assert not re.search(r"tensorflow|\bTF_|\bjax\b|jit_compile", path.read_text(), re.IGNORECASE), path


def test_the_codes_that_stand_in_its_sentences_are_known() -> None:
    """It takes its constants from the C interface alone, so these are not those of error_code.h."""
    for path in (ROOT / "csrc/bindings/c_client.h", ROOT / "csrc/tensorflow/xla.cc", ROOT / "csrc/jax/library.cc"):
        text = re.sub(r'"\n\s*"', "", path.read_text())  # a sentence may stand on several lines
        sentences = re.findall(r'"([^"]* \[[a-z-]+\])"', text)
        assert sentences, path
        assert all(code_of(sentence) for sentence in sentences), sentences
