"""The jax backend of agnoload."""
