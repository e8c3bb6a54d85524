"""First stage, PyTorch: a torch.export program becomes a float Relax module."""
