"""Parameter server and its workers: protocol, modes, checkpoints and TLS."""

import os

# gRPC logs a line for each connection attempt that is not TLS, so that strangers could fill the disk. It reads this
# variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
