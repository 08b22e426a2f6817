"""Papers measured again: what they claim as data, what comes out here beside it."""
