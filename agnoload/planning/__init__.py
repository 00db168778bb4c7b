"""What an epoch asks for: runs in the process of the user, and touches no data."""
