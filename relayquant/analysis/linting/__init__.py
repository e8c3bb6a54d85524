"""Problems of calibration data, found before it is used, and preprocessing that fits a model."""
