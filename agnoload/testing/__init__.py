"""Checks and fakes for people who extend this library, and for its own tests: they come through the same door."""

from agnoload.testing.backends import check_backend
from agnoload.testing.leaks import no_leaks
from agnoload.testing.pools import FakePool
from agnoload.testing.resume import check_resume
from agnoload.testing.samplers import check_sampler

__all__ = ["FakePool", "check_backend", "check_resume", "check_sampler", "no_leaks"]
