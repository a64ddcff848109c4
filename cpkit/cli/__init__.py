"""The command line: one file a command. Parsing needs the standard library alone, so that --help is immediate."""
