"""Simulation: float module + plan -> calibration graph, whose scales and zero points are
variables.
"""

from relayquant.stages.simulation.graph import build_calibration_graph

__all__ = ["build_calibration_graph"]
