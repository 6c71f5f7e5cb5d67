"""How long the questions take that constant-lookups keeps the answers of."""
