"""``returns=sum``: the worker and the server side of sums of compressed gradients."""
