"""Products on a matrix unit: specification -> plan, copies of images, tiles, stored results."""
