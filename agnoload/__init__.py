"""A data loader for every array framework, with a core that knows none of them."""

from agnoload.errors import AgnoloadError, AgnoloadWarning, BackendUnavailable, CollateError, OptionError
from agnoload.plugins import get_backend, list_backends
from agnoload.protocols import Backend
from agnoload.tree import map_leaves

__all__ = [
    "AgnoloadError",
    "AgnoloadWarning",
    "Backend",
    "BackendUnavailable",
    "CollateError",
    "OptionError",
    "get_backend",
    "list_backends",
    "map_leaves",
]
