"""Weight calibration: constants + input statistics -> parameters and integer weights."""
