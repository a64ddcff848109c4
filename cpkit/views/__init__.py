"""Plans in other forms: shares of work, bytes by collective, index arrays, JSON, files. Nothing is decided here."""
