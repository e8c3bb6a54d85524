"""Model files -> modules (`readers`) and modules -> model files (`writers`)."""
