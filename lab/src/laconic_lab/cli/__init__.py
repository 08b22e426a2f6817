"""The commands ``laconic bench``, ``laconic study`` and ``laconic lab``."""
