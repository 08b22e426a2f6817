"""Trains a GPT over slow links by several methods: time until plain DDP's loss."""

from __future__ import annotations

from laconic_lab.bench.gpt.methods import METHODS
from laconic_lab.bench.gpt.settings import GPTSettings
from laconic_lab.bench.gpt.suite import run_gpt
from laconic_lab.bench.gpt.tables import gpt_tables

__all__ = ["METHODS", "GPTSettings", "gpt_tables", "run_gpt"]
