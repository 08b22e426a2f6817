"""Helpers of the steppers' tests."""

from __future__ import annotations

from laconic_lab.studies.kothari2021.stepper import Stepper


def train_epochs(stepper: Stepper, epochs: int) -> None:
    for _ in range(epochs):
        stepper.begin_epoch()
        for _ in range(stepper.per_epoch):
            stepper.step()
        stepper.end_epoch()
