"""The public name of ``laconic.aggregate.homomorphic``."""

from laconic.aggregate.homomorphic import *  # noqa: F403
from laconic.aggregate.homomorphic import __all__ as __all__
