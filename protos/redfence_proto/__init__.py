"""Contains the contract's generated code, its bounds, its error details, and the parser of durations."""
