"""Update modes of the server: synchronous rounds, and asynchronous or bounded-stale updates."""
