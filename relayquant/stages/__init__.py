"""Float module -> integer module, one stage per folder. Stages do not import each other."""
