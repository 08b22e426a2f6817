"""The parameter server: protocol, server, worker, membership, checkpoints, security."""
