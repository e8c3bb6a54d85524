"""PyTorch reader: a torch.export program -> a float Relax module."""
