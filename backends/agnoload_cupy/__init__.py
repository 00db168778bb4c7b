"""The cupy backend of agnoload."""
