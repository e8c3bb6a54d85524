"""For authors of patterns: models drawn around a row, and a check that all stages agree on it."""
