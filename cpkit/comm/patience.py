"""How long a rank waits for the others of a collective, unless told otherwise; no torch, since --help says it."""

TIMEOUT_S = 120.0
