"""Which deployment serves a trace best: those that are legal, replayed and compared."""
