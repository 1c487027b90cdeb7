"""Strategies of one token per row per turn, and the turns they are taken in."""
