"""Caches that show another cache's keys in another way: forks, branches."""
