"""Schedules of layers, chosen by time on this machine, and the file that keeps them."""
