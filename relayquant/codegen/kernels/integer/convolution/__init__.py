"""Convolutions and products on vectors: specification -> plan, order of tiles, kernel."""
