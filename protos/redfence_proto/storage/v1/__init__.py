"""Generated from protos/; see `make proto`."""
