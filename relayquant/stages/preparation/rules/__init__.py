"""Rules of the canonical form, by family; `canonical` lists them in the order of their turn."""
