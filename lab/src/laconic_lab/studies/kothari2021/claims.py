"""What the paper says, as numbers. Its tables are pictures; these are the numbers that its text gives."""

from __future__ import annotations

from laconic_lab.studies.claims import Claim

__all__ = ["CLAIMS", "PAPER_ACCURACY", "PAPER_COMMUNICATION_MIN", "PAPER_MB", "PAPER_TOTAL_MIN"]


CLAIMS = (
    Claim("vgg_1_mb", "data of an iteration, VGG-11, method 1", "4.2", 137.0, unit="MB", close=13.7),
    Claim("vgg_3_as_1", "method 3's data over method 1's", "8", 1.0, unit="×", close=0.01),
    Claim("vgg_6_mb", "data of an iteration, VGG-11, method 6", "8", 0.48, unit="MB", close=0.24),
    Claim("vgg_1_top1", "top-1 of VGG-11, method 1", "8", 86.0, unit="%", close=1.0),
    Claim("vgg_5_top1", "top-1 of VGG-11, method 5", "8", 79.0, unit="%", close=1.0),
    Claim("vgg_6_over_5", "method 6's top-1 over method 5's, VGG-11", "8", 0.0, ">", "points"),
    Claim("lenet_loss", "most that any method loses on LeNet-5 (2w left out)", "8", 2.0, "<", "points"),
    Claim("vgg_2w", "top-1 of VGG-11, weights by QSGD: no convergence", "5", 20.0, "<", "%"),
    Claim("vgg_comm_5", "method 5's communication time over method 1's", "8", 0.5, unit="×", close=0.1),
    Claim("vgg_comm_6", "method 6's communication time over method 1's", "8", 0.25, unit="×", close=0.05),
    Claim("vgg_minutes_6", "time that method 6 saves on VGG-11, 50 epochs", "8", 15.0, unit="min", close=5.0),
    Claim("lenet_time_6", "LeNet-5 from start to end, method 6 over method 1", "8", 0.5, unit="×", close=0.1),
)
"""In the paper's order. For "does not converge" a bound of 20 % is ours: chance is 10 %."""

PAPER_ACCURACY = {("vgg11", "1"): "86", ("vgg11", "5"): "79", ("vgg11", "6"): "more than 5's"}
PAPER_ACCURACY |= {("lenet5", "6"): "less than 2 points below 1's", ("vgg11", "2w"): "does not converge"}
PAPER_MB = {("vgg11", "1"): 137.0, ("vgg11", "3"): 137.0, ("vgg11", "6"): 0.48}
PAPER_COMMUNICATION_MIN = {("vgg11", "1"): 20.0, ("vgg11", "5"): 10.0, ("vgg11", "6"): 5.0}
PAPER_TOTAL_MIN = {("lenet5", "1"): "20", ("lenet5", "6"): "10", ("vgg11", "6"): "15 less than 1's"}
"""For all of the paper's epochs, all processes on one machine."""
