"""The torch backend of agnoload."""
