"""What pages say of the repository."""
