"""The data flow on one page (`pipeline`), and the calls that run it: whole, or stage by stage."""
