"""Launchers are started here as in tests/runner."""

from launching_fixtures import interrupts_arrive, launch, program

__all__ = ["interrupts_arrive", "launch", "program"]
