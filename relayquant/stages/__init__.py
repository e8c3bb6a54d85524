"""Float module -> integer module, one stage in each folder; a stage knows no other stage."""
