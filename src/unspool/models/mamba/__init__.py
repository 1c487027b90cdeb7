"""Mamba: a state space model."""
