"""The only folder that calls torch.distributed."""
