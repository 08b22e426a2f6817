"""What the paper says, as numbers. Its figures are pictures; these are what its text and its formulas give."""

from __future__ import annotations

from laconic_lab.studies.claims import Claim

__all__ = ["CLAIMS"]

CLAIMS = (
    Claim("gzip_weights", "gzip makes AlexNet's weights smaller by", "table 1", 1.079, unit="×", close=0.03),
    Claim("gzip_slow", "gzip's seconds for AlexNet over those of a transfer", "table 1", 1.0, ">", "×"),
    Claim("crossover", "workers from which AlexNet's transfer takes longer than its computation", "4.2", 25.0, "<"),
    Claim("gzip_loses", "workers of 1 to 25 for which gzip is slower than vanilla", "4.2", 25.0, "=", close=0.0),
    Claim("h_16", "largest h that still beats vanilla on 16 workers, rho 0.5", "4.3", 2.0, ">"),
    Claim("gemm", "share of AlexNet's time in convolutions and matrix products", "5", 0.5, ">"),
    Claim("measured_h", "h that a compressed AlexNet really has", "4.3", 1.0, ">"),
)
"""Of the paper's figures without numbers the shape is claimed: what overtakes what, and where."""
