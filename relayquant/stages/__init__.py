"""The stages that turn a float module into an integer module, one folder each. Stages do not
import each other.
"""
