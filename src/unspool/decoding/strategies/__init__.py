"""Strategies of one token a row a turn, and the turns they are taken in."""
