"""The server commands, one module each: HELP, configure(parser), run(arguments) -> exit status."""
