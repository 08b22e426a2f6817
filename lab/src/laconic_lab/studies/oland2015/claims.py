"""What the paper says, as numbers."""

from __future__ import annotations

from laconic_lab.studies.claims import Claim

__all__ = ["CLAIMS"]


CLAIMS = (
    Claim("c5_raw_bits", "bits a weight at c = 5, before coding", "5.1", 6.8, unit="bits", close=0.34),
    Claim("c5_raw_times", "times smaller than float32", "5.1", 4.70, unit="×", close=0.25),
    Claim("c5_coded_bits", "bits a weight at c = 5, Huffman-coded", "5.1", 3.55, unit="bits", close=0.36),
    Claim("c5_coded_times", "times smaller than float32", "5.1", 9.01, unit="×", close=0.9),
    Claim("c5_peak", "best accuracy of c = 5 beside the baseline's", "5.1", 0.0, "<", "points"),
    Claim("c6_coded_bits", "bits a weight at c = 6, Huffman-coded", "5.2", 3.78, unit="bits", close=0.38),
    Claim("c6_coded_times", "times smaller than float32", "5.2", 8.47, unit="×", close=0.85),
    Claim("c6_peak", "best accuracy of c = 6 beside the baseline's", "5.2", 0.0, ">", "points"),
    Claim("c6_final", "last accuracy of c = 6 beside the baseline's", "5.2", 0.0, ">", "points"),
    Claim("c6_epochs", "fewer epochs to the best accuracy at c = 6", "5.2", 20.0, unit="%", close=4.0),
    Claim("c6_overall", "less traffic in all at c = 6, epochs counted", "5.2", 10.32, unit="×", close=1.0),
    Claim("fixed_8", "accuracy of 8 fixed bits beside the baseline's", "3.1, 5.1", 0.0, unit="points", close=0.1),
    Claim("best_floor", "best c while c + M = 10", "5.1", 6.0, "best"),
    Claim("correlation", "correlation of log(G + 1) and entropy, in the worst layer", "3.4", 0.75, ">"),
    Claim("uncentred", "the same, means not subtracted", "3.4", 0.75, ">"),
    Claim("sampling", "largest error of an entropy from 3 % of the weights", "3.4, 5.1", 0.25, "<", "bits"),
)
"""In the paper's order. It gives no bound for the last one, "very little": a quarter of a bit is ours."""
