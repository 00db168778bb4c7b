"""What agnoload costs, beside torch's loader and beside no loader at all: `python -m benchmarks --help`."""
