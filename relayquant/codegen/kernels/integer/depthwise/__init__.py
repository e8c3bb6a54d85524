"""Depthwise convolutions: specification -> plan -> loops in which each channel is one lane."""
