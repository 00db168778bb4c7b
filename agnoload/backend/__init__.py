"""What turns the arrays of a batch into those of another library."""
