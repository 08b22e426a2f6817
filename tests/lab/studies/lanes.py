"""What tests of the study's lanes share."""

from __future__ import annotations

from laconic_lab.studies.kothari2021.stepper import Lane


def epochs_of(lane: Lane, epochs: int) -> None:
    for _ in range(epochs):
        lane.begin_epoch()
        for _ in range(lane.per_epoch):
            lane.step()
        lane.end_epoch()
