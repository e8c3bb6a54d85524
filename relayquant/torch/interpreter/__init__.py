"""Relax functions as steps of torch operators: what trains, and the reference form."""
